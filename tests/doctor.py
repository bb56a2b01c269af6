"""Run a training script as it is, compare its ranks, and say what goes wrong in silence.

    torchrun --standalone --nproc-per-node=2 tests/doctor.py train.py --its --flags
    ... tests/doctor.py --timeout 600 train.py    # where a rank may be busy alone for minutes
    ... tests/doctor.py -m package.train --its --flags    # in place of torchrun ... -m package.train
    ... tests/doctor.py --losses 20 train.py    # print the first losses, to compare with one process

This file needs torch alone and can be copied anywhere. Rank 0 prints findings, on stderr, and exits
with code 1 if there are any, or if the doctor itself fails; torchrun then makes a report of its
own, and ends ranks that are still at work after destroy_process_group(). As one finding may hide
another, run it again when it is fixed.

It looks at
- the parameters and learning rates of each optimizer, after its steps 1, 2, 3, 4, 8, 16, 32, ... and
  every 100th, and at the end, unless the script has changed the parameters since the last step; it
  counts the steps of all optimizers together
- batches (tensors, also in lists and dicts, and whole objects, such as graphs): those of a DataLoader's
  first four passes, or DDP's inputs in train(), unless one of these has a grad_fn. It knows a sample by its
  bytes. As augmentation changes these, it also compares a batch's integers (8 or more), such as labels,
  unless each occurs only once, as the numbers of samples do
- buffers and other tensors of a model, before DDP's forward passes in train(), or without DDP at the end
- copies of DDP's model that change, such as an average of its weights (EMA), after 8 steps
- what torch's global generators, random and numpy.random have drawn between two steps
- random_split, shuffle=True, DistributedSampler and, once, lists, arrays and tables of its data set
- the length of OneCycleLR, CosineAnnealingLR, and a LambdaLR that ends at 0, if it or the run has more
  than 15 steps
- collectives that wait longer than 20 s, or the script's or its library's own limit, such as the 30
  minutes of Lightning. They fail, and the line of each rank is shown. --timeout changes this limit, but
  not one that is passed to new_group, nor those of new_group itself, monitored_barrier, send and recv. With NCCL,
  torch ends the ranks, and torchfrtrace names the collective that they do not share: README.md

What a `suspicion` names may be on purpose. Even a `mistake` may be right, where
- ranks differ on purpose: local SGD, experts, tensor parallelism, hidden states, caches, folds, probes,
  adversarial noise or copies of the model (MAML) that each rank fits alone
- ranks agree on purpose: one replay buffer, dates, points of a boundary, prompts of classes, labels for
  which a model draws its own noise, one graph of whose nodes each takes its share, samples that each
  augments in its own way, or a random order of which each takes its share
- ranks take their parts of what all have loaded, or their data sets are shares
- rank 0's statistics are enough, as in a BatchNorm of one's own
- an order comes again on purpose: in a second phase or a search for a learning rate, of the same
  optimizer or of two that take turns; in validation batches that are taken one by one between the
  steps; by a class made of DistributedSampler

"Nothing found" is no proof, as it sees nothing else. Above all, it does not see
- how a loss is divided, or pairs that a contrastive loss misses: for these, --losses
- a metric that is not all-reduced, or that leaves samples out
- samples that a metric counts twice, except repeats of a DistributedSampler that does not shuffle, or
  whose whole loop is under no_grad()
- BatchNorm's statistics at an evaluation, and an average of the weights (EMA) after step 8, or in no
  module of the model's class, or that only some ranks update; tensors of a module that DDP does not
  wrap, such as a loss that keeps a center
- samples that ranks share in other orders, if there are few, or if they are padded, in no tensor of two
  dimensions, shuffled by a batch sampler of the script's own, or augmented and without a text; augmented
  samples in the same order, if a pass has fewer than 8 batches, or by a sampler of torch, if a batch has
  no 8 integers
- samples that some ranks validate on and others train on, unless by random_split
- random numbers of a generator of the script's own, or of a loader's workers alone, or where ranks draw
  unequally many
- one augmentation in all epochs, and what a checkpoint lacks
- one order in all epochs, where no DistributedSampler, or class made of it, gives it; where the script
  keeps batches, as itertools.cycle(loader) does; where workers take the order before the first step; where
  each epoch has a new optimizer, a new sampler beside the old one, or a new data set whose samples are not
  known to be the same
- draws with replacement, as of WeightedRandomSampler, that take as many samples as on one GPU
- vocabularies that differ by rank
- what differs between its looks, and what is compiled: batches and buffers under torch.compile(ddp),
  steps under torch.compile of the optimizer's step

It does not compare sharded parameters (DTensor, FSDP), nor what ranks do after a first `Join` (DDP.join),
does not know DeepSpeed or CUDA graphs, and does not reach processes that the script starts by itself
(mp.spawn).
"""

import argparse
import collections
import contextlib
import ctypes
import faulthandler
import functools
import gc
import hashlib
import inspect
import itertools
import json
import math
import numbers
import os
import random
import re
import runpy
import signal
import sys
import sysconfig
import threading
import time
import traceback
import types
import weakref
from datetime import timedelta

import torch
import torch._dynamo
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedTensorMixin
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
)
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter

KNOWN = ("builtins", "torch.", "torchvision.")  # data sets whose samples are those of what they have
BUSY, SILENT = " (in no collective)", " does not answer: it has died, or is in a call that keeps Python busy"
ANSWER = 5  # seconds in which a rank that lives says where it is
SIMPLE = str, bytes, numbers.Number, range, slice, os.PathLike, type(None)  # what `digest` hashes, also NumPy's
CLOSED = torch.Tensor, torch.nn.Module, Dataset, type, types.ModuleType  # what `opened` does not look into
MOST_LEAVES = 100_000
IN_VAIN = "(?<!DataLoader )[Tt]imed out|[Tt]imeout|Connection (closed|reset)|Broken pipe|collective mismatch"
CAUSES = "the same (batches|samples|integers|share)|the data set of|shares overlap|random_split"
WAITING = (  # collectives, and what else waits for other ranks
    "all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all all_to_all_single barrier broadcast "
    "broadcast_object_list gather gather_object monitored_barrier recv reduce reduce_scatter reduce_scatter_tensor "
    "scatter scatter_object_list send"
)
COUNTED = "optimizer", "copies", "inputs", "tensors", "buffers"  # looks at a step or a pass of the same number
FOLLOWS = {  # what is not said after what
    "suspicion.*the same (samples|integers)|the data set of": CAUSES,
    "perhaps in other orders": "the same batches",
    "copies of the model": "the ranks' weights differ",
    "the ranks' weights differ": "the learning rates differ",
}
UNWRAPPED = [
    "No DDP has these parameters: wrap the model, and in training, call the wrapper. Where gradients are averaged by",
    "hand: begin with equal weights, and average all gradients in each step.",
]
UNCALLED = ["The script has not called the wrapper, only the model: in training, call the wrapper."]
# The last may be elsewhere, as in a user's own site-packages.
LIBRARIES = (*sysconfig.get_paths().values(), __file__, "<", os.path.dirname(os.path.dirname(torch.__file__)))


def main(arguments=None):
    """Run a script, with looks before and after functions of torch. Exit as it does, or with 1."""
    formatter = argparse.RawDescriptionHelpFormatter
    finds = [look.__doc__.partition("\n")[0] for checks in CHECKS.values() for look, *_ in checks]
    finds = ["what it finds:", *dict.fromkeys(finds), "ranks have waited for others in vain"]
    finds = "\n  ".join(finds)
    parser = argparse.ArgumentParser(description=__doc__, epilog=finds, formatter_class=formatter)
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--timeout", type=float, help="seconds a collective may wait; default: 20")
    modes.add_argument("--losses", metavar="STEPS", type=int, help=print_losses.__doc__.partition("\n\n")[0])
    parser.add_argument("-m", dest="is_module", action="store_true", help="the script is a module, as for python -m")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    args = parser.parse_args(arguments)
    if args.losses:
        tell = print_losses(args.losses)
        try:
            return run_script(args.script, args.arguments, args.is_module)
        finally:
            tell()
    doctor = Doctor(args.timeout)
    for module in (dist, dist.distributed_c10d, dist.device_mesh):
        doctor.hook(module, "init_process_group", after=doctor.join)
        doctor.hook(module, "new_group", after=doctor.after_group)
    for module in (dist, dist.distributed_c10d):
        doctor.hook(module, "destroy_process_group", before=doctor.before_destroy)
    for module in (torch.utils.data, torch.utils.data.dataset):
        doctor.hook(module, "random_split", after=doctor.after_split)
    for module, name in itertools.product((dist, dist.distributed_c10d), WAITING.split()):
        replace(module, name, doctor.note_if_in_vain)
    replace(dist.Work, "wait", doctor.note_if_in_vain)
    replace(torch.autograd, "backward", doctor.note_if_in_vain)
    for name in ("__init__", "forward"):
        replace(DistributedDataParallel, name, doctor.note_if_in_vain)
    doctor.hook(DistributedSampler, "__init__", after=doctor.after_sampler)
    doctor.hook(DistributedSampler, "__iter__", after=doctor.follow)
    doctor.hook(DataLoader, "__iter__", before=doctor.before_iter, after=doctor.after_iter)
    doctor.hook(_BaseDataLoaderIter, "_next_index", after=doctor.after_index)
    doctor.hook(_BaseDataLoaderIter, "__next__", before=doctor.before_next, after=doctor.after_next)
    doctor.hook(DistributedDataParallel, "__init__", after=doctor.after_wrapping)
    doctor.hook(DistributedDataParallel, "forward", before=doctor.before_forward)
    doctor.hook(Join, "__exit__", before=doctor.before_join_ends)
    doctor.hook(LRScheduler, "step", after=doctor.after_schedule)
    register_optimizer_step_post_hook(doctor.step_hook)
    for name in ("spawn", "start_processes"):
        doctor.hook(torch.multiprocessing, name, before=doctor.before_spawn)
    faulthandler.enable()  # if Gloo or NCCL abort the process, its line is printed
    code, error = None, KeyboardInterrupt()  # or what it becomes below
    try:
        run_script(args.script, args.arguments, args.is_module)
        error = None
    except SystemExit as raised:
        code, error = raised.code, raised if raised.code else None
    except Exception as raised:
        code, error = 1, raised.with_traceback(raised.__traceback__.tb_next.tb_next)
        sys.excepthook(type(error), error, error.__traceback__)  # without the lines of this file
    finally:
        doctor.safely(doctor.finish, error)
    doctor.conclude(error)
    broken = doctor.said or (doctor.failed and doctor.rank == 0)
    sys.exit(1 if not code and broken else code)


def run_script(script, arguments, is_module):
    """Do what `python script arguments` does, or `python -m script arguments`."""
    sys.argv = [script, *arguments]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    # By this name, workers that are no forks send objects of classes of the script.
    alias = sys.modules["__mp_main__"] = types.ModuleType("__mp_main__")
    alias.__getattr__ = lambda name: getattr(sys.modules["__main__"], name)
    if is_module:
        sys.path[0] = os.getcwd()
        # What the module has made lives on in `module`, for the looks at the end.
        return module.__dict__.update(runpy.run_module(script, run_name="__main__", alter_sys=True))
    path = os.path.abspath(script)
    module.__file__, module.__builtins__ = path, __builtins__
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    with open(path, "rb") as file:
        source = file.read()
    exec(compile(source, path, "exec"), module.__dict__)


def replace(owner, name, replacement):
    """Replace a function by another, which is given the real one first."""
    real = getattr(owner, name)
    setattr(owner, name, functools.wraps(real)(lambda *args, **kwargs: replacement(real, *args, **kwargs)))


def print_losses(steps):
    """print losses and norms of gradients of the first steps, averaged over the ranks, and stop. See README.md

    All passes of a step are added up. What would differ with the number of ranks is taken out: dropout
    drops nothing, BatchNorm normalizes each sample by itself, and before a data set returns a sample,
    the global generators are seeded by its index. Workers would not know of that, so there are none.
    """
    losses, lines, numpy = [], [], sys.modules.get("numpy")
    clipped = {}  # by parameter, the norm of its gradient before it was clipped; the gradient after that, its version

    def backward(real, tensors, *args, **kwargs):
        roots = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        losses.extend(x.item() for x in roots if x.numel() == 1)  # activation checkpointing calls it with others
        return real(tensors, *args, **kwargs)

    def clip(real, parameters, *args, **kwargs):
        params = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
        norms = {p: norm_of_gradient(p) for p in params if p.grad is not None}
        result = real(params, *args, **kwargs)
        clipped.update((p, (norm, p.grad, p.grad._version)) for p, norm in norms.items())
        return result

    def norm_of_gradient(p):
        norm, gradient, version = clipped.get(p, (0, None, 0))
        return norm if gradient is p.grad and version == p.grad._version else p.grad.norm().item()

    def after_step(optimizer, args, kwargs):  # as Lightning computes the loss within the step
        params = parameters(optimizer)
        norms = [norm_of_gradient(p) for p in params if p.grad is not None]
        numbers = torch.tensor([sum(losses), math.hypot(*norms)], device=params[0].device)
        losses.clear()
        if dist.is_initialized():
            dist.all_reduce(numbers)
            numbers /= dist.get_world_size()
        loss, norm = numbers.tolist()
        lines.append(f"doctor: step {len(lines) + 1}: loss {loss:.6g}, norm of the gradient {norm:.6g}")
        if len(lines) == steps:
            tell()
            time.sleep(1)  # as another rank may still read from this process, by NCCL
            os._exit(0)

    def tell():
        if os.environ.get("RANK", "0") == "0":
            print("", *lines, sep="\n", flush=True)

    def drop_nothing(real, input, p=0.5, training=True, inplace=False):
        return real(input, p, False, inplace)

    def stop_dropping(module, args):  # such as drop path
        if re.search("(?i)drop|stochastic", type(module).__name__):
            module.training = False

    def normalize(real, *args, **kwargs):
        bound = inspect.signature(real).bind(*args, **kwargs)
        bound.apply_defaults()
        has = bound.arguments
        if has["training"]:
            return functional.group_norm(has["input"], 1, has["weight"], has["bias"], has["eps"])
        return real(*args, **kwargs)

    def attend(real, query, key, value, attn_mask=None, dropout_p=0.0, *args, **kwargs):
        return real(query, key, value, attn_mask, 0.0, *args, **kwargs)

    def make_recurrent(real, module, *args, **kwargs):
        real(module, *args, **kwargs)
        module.dropout = 0.0

    def fetch(real, fetcher, indices):
        if not fetcher.auto_collation:
            return real(fetcher, indices)
        return fetcher.collate_fn([draw(fetcher.dataset, index) for index in indices])

    def draw(dataset, index):
        before = torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None
        seed(int(digest(index)[:8], 16))
        sample = dataset[index]
        torch.set_rng_state(before[0]), random.setstate(before[1])
        if numpy:
            numpy.random.set_state(before[2])
        return sample

    def seed(number):
        torch.manual_seed(number), random.seed(number)
        if numpy:
            numpy.random.seed(number)

    def iterate(real, loader):
        if not isinstance(loader.dataset, IterableDataset):
            loader.num_workers = loader.timeout = 0
        return real(loader)

    seed(0)  # of weights, where the script has none
    register_optimizer_step_post_hook(after_step)
    replace(torch.autograd, "backward", backward)
    for module in (torch.nn.utils, torch.nn.utils.clip_grad):
        replace(module, "clip_grad_norm_", clip)
        replace(module, "clip_grad_value_", clip)
    functional = torch.nn.functional
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
        replace(functional, name, drop_nothing)
    torch.nn.modules.module.register_module_forward_pre_hook(stop_dropping)
    replace(functional, "batch_norm", normalize)
    replace(functional, "scaled_dot_product_attention", attend)
    replace(torch.nn.RNNBase, "__init__", make_recurrent)
    replace(_MapDatasetFetcher, "fetch", fetch)
    replace(DataLoader, "__iter__", iterate)
    torch.nn.SyncBatchNorm.forward = torch.nn.BatchNorm2d.forward
    return tell


class Doctor:
    """What a rank has seen. References to what is the script's are weak.

    The ranks talk through the key-value store by which they have met: each leaves there what it
    sees at a place, and rank 0 compares what all have left. So the doctor adds no collective, and
    no rank waits for another before the end.
    """

    def __init__(self, limit):
        self.asked, self.limit, self.process = limit is not None, limit or 20, os.getpid()
        self.store, self.watcher, self.lock = None, None, threading.Lock()
        self.stderr = sys.stderr  # which torch replaces while the main thread prints a traceback
        self.spawned = False  # whether the script has started processes by itself
        self.failed = False  # by an error of its own, after which it does not look
        self.limited = False  # whether collectives wait for `limit`, not for what the script has set
        self.rank = self.steps = self.passes = self.epochs = 0
        self.ranks = range(1)
        self.said, self.sharded = [], False
        self.in_vain = None  # where this rank was when it had waited in vain for others
        self.joined = False  # whether ranks may have taken unequally many steps on purpose
        self.waiting = {}  # looks of rank 0 that have not been compared
        self.number = collections.defaultdict(lambda: itertools.count(1))  # of things of a kind
        self.optimizers, self.states, self.kept = weakref.WeakKeyDictionary(), [], {}
        self.wrappers, self.samplers = weakref.WeakKeyDictionary(), weakref.WeakKeyDictionary()
        self.called = weakref.WeakSet()  # wrappers; under torch.compile, this is not seen
        self.loaders, self.iterators = weakref.WeakKeyDictionary(), weakref.WeakKeyDictionary()
        self.classes = {DistributedSampler}  # whose orders it follows
        # By data set or what is in it, the last that was trained on, and its sampler.
        self.orders, self.orders_of_contents = weakref.WeakKeyDictionary(), {}
        self.shuffled = weakref.WeakKeyDictionary()  # the data sets of iterators that do it, and lengths
        self.left_out = weakref.WeakKeyDictionary()  # by sampler, how many samples of a rank the loader drops
        self.subsets = weakref.WeakKeyDictionary()  # by sampler
        self.fetched = {}  # of these, those that were used since the last step
        self.used = {}  # the number of the step before which each was used last
        self.schedules, self.splits, self.random = {}, [], {}

    def hook(self, owner, name, before=None, after=None):
        """Replace a function by `before(...)`, itself, and `after(result, ...)`."""

        def replacement(real, /, *args, **kwargs):
            if before and not torch.compiler.is_compiling():
                self.safely(before, *args, **kwargs)
            result = real(*args, **kwargs)
            other = self.safely(after, result, *args, **kwargs) if after else None
            return result if other is None else other

        replace(owner, name, replacement)

    def safely(self, look, /, *args, **kwargs):
        """No error of the doctor's own ends the script. It ends the looks."""
        try:
            return look(*args, **kwargs)
        except Exception as error:
            # If rank 0 has ended, so has the store.
            if self.rank == 0 or not isinstance(error, dist.DistError):
                self.stderr.write(f"doctor: my own error, in {look.__name__}: {error!r}\n")
                self.failed = True
            with contextlib.suppress(Exception):
                self.store.set("failed", "")
                self.tell("")  # rank 0 need not wait for more
            self.store = None

    def note_if_in_vain(self, real, /, *args, **kwargs):
        """Do what the real function does. If it has waited in vain, note where, as the script may catch the error."""
        try:
            return real(*args, **kwargs)
        except RuntimeError as error:
            if self.in_vain is None and re.search(IN_VAIN, str(error)):
                self.in_vain = script_lines(traceback.extract_stack())
            raise

    def step_hook(self, *args):
        if not torch.compiler.is_compiling():
            self.safely(self.after_step, *args)

    def before_spawn(self, *args, **kwargs):
        self.spawned = True
        self.stderr.write("doctor: the script starts processes by itself, which I do not look at\n")

    def join(self, _, backend=None, init_method=None, timeout=None, *args, **kwargs):
        """Begin to look, as there is a process group."""
        self.rank, self.ranks = dist.get_rank(), range(dist.get_world_size())
        if len(self.ranks) == 1 or self.store is not None:
            return
        if timeout is None or self.asked:  # set only now, as ranks may be late when they meet
            self.limited = True
            self.after_group(dist.group.WORLD)
        else:
            self.limit = timeout.total_seconds()
        store, number = dist.distributed_c10d._get_default_store(), next(self.number["group"])
        # A clone, as a thread that waits by the script's own would keep the watcher from it.
        self.store, self.told = dist.PrefixStore(f"doctor {number}", store.clone()), False
        self.lines = [f"line {rank}" for rank in self.ranks]
        self.stop = threading.Event()
        self.watcher = threading.Thread(target=self.safely, args=[self.watch], daemon=True)
        self.watcher.start()
        for split in self.splits:
            self.look(*split)

    def after_group(self, group, ranks=None, timeout=None, *args, **kwargs):
        """Let collectives wait for less than torch's minutes, unless the script has set a limit."""
        if self.limited and timeout is None and group is not dist.GroupMember.NON_GROUP_MEMBER:
            set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)
            set_timeout(timedelta(seconds=self.limit), group)

    def look(self, place, key, count, *things):
        """Let the checks of a place look at things, and leave in the store what they see."""
        # A worker of a DataLoader has the process group of its parent, and is another process.
        if self.store is None or self.in_vain or not due(count) or os.getpid() != self.process:
            return
        if self.joined and place in COUNTED:
            return
        facts = json.dumps([look(*things) for look, *_ in CHECKS[place]])
        if self.rank:
            self.store.set(f"{place} {key} {count} {self.rank}", facts)
            return
        when = "at the end" if count == "the end" else f"after optimizer step {self.steps}"
        with self.lock:  # a loader may run in a thread of the script's
            self.waiting[place, key, count] = when, facts, getattr(things[0], "cause", [])
            self.compare()

    def compare(self):
        """On rank 0, compare what all ranks have left."""
        keys = {look: [" ".join(map(str, [*look, rank])) for rank in self.ranks[1:]] for look in self.waiting}
        # The last is asked for first: when it is there, so are those before it, which may be its cause.
        there = [look for look in reversed(keys) if self.store.check(keys[look])]
        for look in reversed(there):
            when, facts, cause = self.waiting.pop(look)
            texts = [facts, *map(self.store.get, keys[look])]
            for key in keys[look]:  # or the store would grow all the time
                self.store.delete_key(key)
            for check, *ranks in zip(CHECKS[look[0]], *map(json.loads, texts), strict=True):
                self.judge(*check, when, cause, *zip(*ranks, strict=True))

    def judge(self, look, compare, word, when, cause, kinds, found):
        """On rank 0, say what a check finds. Things of unequal kinds are not comparable."""
        names = compare(*found) if kinds.count(kinds[0]) == len(kinds) else []
        if names:
            what, *lines = (line.strip() for line in look.__doc__.splitlines())
            remedy = [line for line in lines if line and "#" not in line]  # where it happened has a number
            remedy = cause or remedy if look is weights else remedy
            more = f" and {len(names) - 3} more" * (len(names) > 3)
            seen = f": {', '.join(names[:3])}{more}; first seen {when}"
            self.say(f"{word}: {what}", seen, *remedy)

    def say(self, what, details, *lines):
        """On rank 0, print a finding, once, if it does not follow from another."""
        said = " ".join(self.said)
        known = any(re.search(later, what) and re.search(cause, said) for later, cause in FOLLOWS.items())
        if what not in self.said and not known:
            self.said.append(what)
            # A bar may be on this line.
            self.stderr.write("\n" + "\n        ".join([f"doctor: {what}{details}", *lines]) + "\n")

    def after_step(self, optimizer, args, kwargs):
        if self.store is None:
            return
        self.steps += 1
        for key, dataset in self.fetched.items():
            # Training uses a data set in each step, or where optimizers take turns, in one of a few.
            if self.steps - self.used.get(key, -math.inf) <= max(1, len(self.states)):
                self.look("DataLoader", "", next(self.number["DataLoader"]), dataset)
            self.used[key] = self.steps
        self.fetched = {}
        params = parameters(optimizer)
        if optimizer not in self.optimizers:
            self.meet(optimizer, params)
        state = self.optimizers[optimizer]
        if len(params) > len(state.names):  # layers were unfrozen
            state.names = owner_and_names(params)[1]
        state.steps += 1
        state.rates = [float(group.get("lr") or 0) for group in optimizer.param_groups]
        state.norms = norms(optimizer)
        called = any(ref() in self.called for ref in state.wrappers) or torch._dynamo.utils.counters["frames"]
        if called and state.cause is UNCALLED:
            state.cause = []  # from now on, as a second wrapper may replace the one that was called
        # What has taken a step lately is kept for the look at the end, before which `main()` may return.
        self.kept = {key: kept for key, kept in self.kept.items() if self.steps - kept[0] < 100}
        self.kept[state.key] = self.steps, optimizer, state.model()
        before, state.random = state.random, random_states()
        for name, drawn in drawn_between(before, state.random).items():
            state.draws[name] = [*state.draws[name][-2:], drawn]
        self.look("optimizer", state.key, state.steps, state, params)
        if state.steps in (4, 8):
            owned = {id(p) for known in self.optimizers for p in parameters(known)}
            for ddp in [*self.wrappers]:
                if params and any(p is params[0] for p in ddp.module.parameters()):
                    self.look("copies", state.key, state.steps, ddp.module, owned, state.copies)

    def meet(self, optimizer, params):
        state = types.SimpleNamespace(steps=0, random={}, copies={})  # these are hashes, by id
        state.draws, state.model = collections.defaultdict(list), lambda: None
        state.optimizer = weakref.ref(optimizer)
        # Where each task or parameter has an optimizer of its own, the search would take minutes.
        many = len(self.states) > 20
        unnamed = None, [f"parameter {i}" for i in range(len(params))]
        model, state.names = unnamed if many else owner_and_names(params)
        first = next(iter(params), None)  # a rank of ZeroRedundancyOptimizer may have none
        wrappers = [ddp for ddp in self.wrappers if any(p is first for p in ddp.module.parameters())]
        state.groups = [dist.get_process_group_ranks(ddp.process_group) for ddp in wrappers]
        state.wrappers, state.cause = [*map(weakref.ref, wrappers)], UNCALLED if wrappers else UNWRAPPED
        # FSDP1's are plain tensors, but parts, perhaps of sizes that differ by rank.
        state.sharded = not all(map(has_bytes, params)) or any("_fsdp_wrapped_module" in x for x in state.names)
        # Before it wraps the model, one rank may have tried steps on a copy, by an optimizer of the same kind.
        shapes = [] if state.sharded else sorted([*p.shape] for p in params)
        kind = f"{type(optimizer).__name__} {digest([shapes, bool(wrappers)])}"
        state.key = f"{kind} {next(self.number[kind])}"
        if model is not None and not wrappers:
            state.model = weakref.ref(model)
        self.optimizers[optimizer] = state
        self.states.append(state)
        self.sharded |= state.sharded

    def after_wrapping(self, _, ddp, *args, **kwargs):
        state = self.wrappers[ddp] = types.SimpleNamespace(key=next(self.number["DDP"]), passes=0)
        state.batches = Batches(f"inputs of {type(ddp.module).__name__}")
        state.plain = [name for name, _ in plain_attributes(ddp.module)]
        state.copied = ddp.broadcast_buffers

    def before_forward(self, ddp, /, *inputs, **kwargs):
        if self.store is None or not torch.is_grad_enabled():
            return
        self.passes += 1
        self.called.add(ddp)
        if not ddp.module.training:
            return
        if ddp not in self.wrappers:  # it is a copy
            self.after_wrapping(None, ddp)
        state = self.wrappers[ddp]
        state.passes += 1
        # What has a grad_fn is computed, and no data: as embeddings of all ranks, it may be the same.
        computed = any(getattr(x, "grad_fn", None) is not None for x in tree_leaves([inputs, kwargs]))
        if dist.get_world_size(ddp.process_group) == len(self.ranks):
            if not computed:
                state.batches.add([inputs, kwargs])
                if state.passes < 255:
                    self.look("batches", state.key, state.passes, state.batches.name, state.batches.hashes)
                if 2 < state.passes <= 5000:  # without a DataLoader, too, each rank may go through all samples
                    self.look("inputs", state.key, state.passes, state.batches)
            self.look("tensors", state.key, state.passes, ddp.module, state)
            if state.copied:
                self.look("buffers", state.key, state.passes, ddp.module)

    def before_join_ends(self, *_):
        self.joined = True

    def before_seed(self, *_):
        self.random = {} if self.store is None else random_states()

    def after_seed(self):
        # A seed is no draw, as it may be the same on all ranks: of a loader's workers, of its order.
        now = random_states() if self.random else {}
        for state in self.states:
            drawn = drawn_between(state.random, self.random)
            state.random |= {name: new for name, new in now.items() if name not in drawn}

    def before_iter(self, loader):
        self.before_seed()
        if isinstance(loader.sampler, DistributedSampler):
            self.left_out[loader.sampler] = len(loader.sampler) % loader.batch_size if loader.drop_last else 0

    def after_iter(self, iterator, loader):
        self.after_seed()
        # A BatchSampler of the script's own has the sampler, and the loader then another one.
        sampler = loader.batch_sampler.sampler if type(loader.batch_sampler) is BatchSampler else None
        if type(sampler) is RandomSampler and not sampler.replacement:
            self.shuffled[iterator] = loader.dataset, len(loader)
        if type(sampler) is SubsetRandomSampler:
            subset = self.subsets.setdefault(sampler, Subset(loader.dataset, sampler.indices))
            self.shuffled[iterator] = subset, len(loader)
        self.begin(iterator, loader)

    def begin(self, iterator, loader):
        """Return what is known of a pass of a loader. After an optimizer step, it counts as training."""
        known = self.loaders.setdefault(loader, types.SimpleNamespace(number=None, passes=0, epochs=0, last=None))
        self.end_pass(known)
        new = types.SimpleNamespace(loader=known, key=None, begun=self.steps, steps=0, yielded=0)
        new.batches = Batches(f"batches of {type(iterator._dataset).__name__}")
        self.iterators[iterator] = known.last = new  # with persistent workers, all passes have one iterator
        return new

    def end_pass(self, loader):
        """Look at all batches of a pass together, as the looks before become rare. Count passes that train."""
        if (last := loader.last) is not None:
            loader.epochs += 0 < self.steps - last.begun <= last.yielded * max(1, len(self.states))
            self.epochs = max(self.epochs, loader.epochs)
            if last.key:
                self.look("loader", last.key, "its end", last.batches)

    def before_next(self, iterator):
        if self.begins(iterator):  # then, its sampler may draw the seed of an order
            self.before_seed()

    def begins(self, iterator):
        known = self.iterators.get(iterator)
        return known is not None and known.yielded == 0

    def after_index(self, indices, iterator):
        """Compare what a sampler of the script's own yields: samples that are augmented may have nothing in common."""
        state, sampler = self.iterators.get(iterator), iterator._index_sampler
        if self.store is None or state is None or state.batches.number > 255:
            return
        samplers = [x for x in (sampler, getattr(sampler, "sampler", None)) if x is not None]
        if not all(type(x).__module__.startswith("torch.") for x in samplers):
            # With what the data set has, as the same indices may be of other samples.
            hashed = digest([contents(iterator._dataset)[1], indices])
            state.batches.integers[" of the sampler's indices"].append(hashed)

    def after_next(self, batch, iterator):
        """Compare what a loader yields, too, as each rank may add noise of its own to it later."""
        if self.begins(iterator):
            self.after_seed()
        if self.store is None or not torch.is_grad_enabled():
            return
        state = self.iterators.get(iterator) or self.begin(iterator, iterator)
        state.yielded += 1
        dataset, length = self.shuffled.get(iterator, (None, 0))
        # One batch of each pass is a draw at random, and right, unless it is the whole data set.
        if length and state.yielded >= min(2, length):
            self.fetched[id(dataset)] = dataset
        if state.key is None and state.loader.passes == 4:  # these are enough
            return
        if state.batches.number == 0:
            state.steps = self.steps
        state.batches.add(batch)
        # It is used for training, not for a validation batch now and then.
        steps = self.steps - state.steps
        if 0 < steps <= state.batches.number * max(1, len(self.states)) and state.batches.number <= 5000:
            if state.key is None:
                state.loader.number = state.loader.number or next(self.number["loader"])
                state.loader.passes += 1
                state.key = f"{state.loader.number} {state.loader.passes}"
            count, hashes = state.batches.number, state.batches.hashes
            self.look("batches", state.key, count, state.batches.name, hashes)
            if count > 2:  # so that the same order is found before the same samples
                self.look("loader", state.key, count, state.batches)

    def after_split(self, parts, dataset, *args, **kwargs):
        kind = [len(part) for part in parts], contents(dataset)[1]
        indices = digest([part.indices for part in parts])
        self.splits.append(("random_split", "", next(self.number["split"]), kind, indices))
        self.look(*self.splits[-1])

    def after_schedule(self, _, scheduler, *args, **kwargs):
        steps = scheduler.last_epoch
        length = getattr(scheduler, "total_steps", None) or getattr(scheduler, "T_max", 0)
        if type(scheduler) is LambdaLR:  # which is not called before the end, as it may count its calls
            length = scheduler.lr_lambdas[0]
        optimizer = self.optimizers.get(scheduler.optimizer)
        warm_up = max(0, optimizer.steps - steps) if optimizer else 0  # by another schedule
        length = 0 if warm_up > steps else length  # it counts epochs, which do not become fewer
        self.schedules[id(scheduler)] = type(scheduler).__name__, length, steps, warm_up

    def after_sampler(self, _, sampler, *args, **kwargs):
        """Follow the orders of a class of the script's own, too. Of which samples they are is not known."""
        owner = next(x for x in type(sampler).__mro__ if "__iter__" in vars(x))
        if owner not in self.classes and issubclass(owner, DistributedSampler):
            self.classes.add(owner)
            self.hook(owner, "__iter__", after=lambda *both: self.follow(*both, known=False))

    def follow(self, order, sampler, known=True):
        """Pass a sampler's order on, and look at it when it is used up or given up."""
        # What a class of the script's own counts while it yields would be ahead after a look ahead.
        head, used_up = list(itertools.islice(order, 1000 if known else 0)), False
        begun = head, self.steps, torch.is_grad_enabled(), known
        self.safely(self.before_order, sampler, begun)
        try:
            yield from head
            for index in order:
                head += [index] if len(head) < 1000 else []
                yield index
            used_up = True
        finally:
            self.safely(self.after_order, sampler, begun, used_up)

    def before_order(self, sampler, begun):
        # The end (in steps) is that of the last order that was trained on.
        new = types.SimpleNamespace(order=None, ended=0, peeked=-math.inf, known=False)
        state, name = self.samplers.setdefault(sampler, new), type(sampler.dataset).__name__
        state.begun, known = begun, begun[-1]
        if known and not state.known:
            state.known = True
            self.look("data set", name, next(self.number["data set", name]), sampler)

    def after_order(self, sampler, begun, used_up):
        (head, steps, learns, known), state, again = begun, self.samplers.get(sampler), False
        if state is None:  # the sampler is being deleted, and with it an order that nobody has used up
            return
        state.begun = None if state.begun is begun else state.begun
        # Of orders that are used at once, one is enough: the others are no new epochs.
        trains = self.steps > steps >= state.ended
        if not used_up and self.steps == steps:  # it peeks, or trains in this way, step by step
            trains, state.peeked = steps == state.peeked + 1, steps
            if not trains:
                return
        elif self.steps > steps:  # a pass with steps of its own: those that only peek do not train
            state.peeked = -math.inf
        if learns and trains:
            again, state.ended = self.comes_again(head, sampler, state), self.steps
        # A loop may turn gradients off only where it has a batch.
        evaluates = known and (not learns or (not sampler.shuffle and self.steps == steps))
        if evaluates:  # repeats are the last samples of a rank: a loader with drop_last may leave them out
            repeated = sampler.total_size - len(sampler.dataset)
            evaluates = repeated > self.left_out.get(sampler, 0) * sampler.num_replicas
        name = described(sampler.dataset)
        self.look("order", name, next(self.number[name]), sampler, again, evaluates)

    def comes_again(self, head, sampler, state):
        """Return whether the last order, of this sampler or of one that is gone, was this, for the same optimizers."""
        before, state.order = state.order, (head, len(self.states))
        orders, key = self.orders, sampler.dataset
        if type(key).__module__.startswith(KNOWN):  # a new one may have the same samples
            known, name = contents(key)
            orders, key = (self.orders_of_contents, name) if known else (orders, key)
        with contextlib.suppress(TypeError, RuntimeError):  # of a list or a tensor, which cannot be a key
            old_sampler, old_order = orders.get(key, (lambda: sampler, None))
            before = old_order if before is None and old_sampler() is None else before
            orders[key] = weakref.ref(sampler), state.order
        return before is not None and len(head) > 4 and before[1:] == state.order[1:] and equal(head, before[0])

    def before_destroy(self, group=None):
        if group in (None, dist.group.WORLD):
            self.finish(sys.exc_info()[1])  # the script may do this in a `finally`

    def finish(self, error):
        """Take the last look: the script ends, or destroys its process group."""
        main_thread, caught = threading.current_thread() is threading.main_thread(), []
        catches = self.in_vain and main_thread and self.store is not None
        if catches:  # a rank may have died, and torchrun be about to end the others
            handler = signal.signal(signal.SIGTERM, lambda *_: caught.append(True))
        # Of an error, the script speaks itself.
        place = self.in_vain or ("" if error else "has ended")
        if not error:
            self.look_at_end()
        if self.store is not None:
            if self.in_vain:
                self.store.set("trouble", "")
            self.tell(place)
        if self.watcher is not None:  # a thread that outlives the interpreter may abort it
            self.stop.set()
            self.watcher.join()
        if self.store is not None:
            self.conclude_together(place)
        if catches:
            signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)
            if caught and callable(handler):  # of a script that goes on
                signal.raise_signal(signal.SIGTERM)
        self.store = None

    def conclude_together(self, place):
        if self.rank == 0:  # it may hold the store, and so ends last
            self.wait_until(self.lines, ANSWER if self.in_vain else self.limit + 10 if place else 0)
            with self.lock:
                self.compare()
            self.failed |= self.store.check(["failed"])
            if self.store.check(["trouble"]):
                self.explain()
        elif self.in_vain and not self.wait_until(["explained"], 3 * ANSWER) and self.store.add("speaks", 1) == 1:
            self.explain(for_rank_0=True)

    def look_at_end(self):
        for state in self.states:
            # Weights that rank 0 has loaded since the last step, as those that were best, are not compared.
            optimizer = state.optimizer()
            unchanged = optimizer is not None and all(map(torch.equal, norms(optimizer), state.norms))
            self.look("optimizer", state.key, "the end", state, parameters(optimizer) if unchanged else [])
            # Without DDP, buffers may be made equal now and then, so only the last of them count.
            if (model := state.model()) is not None:
                self.look("buffers without DDP", state.key, "the end", model)
        for loader in [*self.loaders.values()]:
            self.end_pass(loader)
        self.look("schedules", "", "the end", self.schedules, self.passes / max(1, self.steps), self.epochs)
        for sampler, state in [*self.samplers.items()]:
            if state.begun:  # in a pass that has not ended, or whose iterator lives on
                self.after_order(sampler, state.begun, used_up=False)

    def watch(self):
        """In a thread: when a rank has waited in vain, say where this one is."""
        while not self.stop.wait(0.2) and self.store is not None:
            if self.store.check(["trouble"]):
                return self.explain()

    def explain(self, for_rank_0=False):
        frame = sys._current_frames()[threading.main_thread().ident]
        lines = traceback.extract_stack(frame)
        if any(line.name == "run_script" for line in lines):  # if not, `finish` is about to tell
            self.tell(script_lines(lines) + BUSY * (not waits(lines[-1]) or computes()))
        if self.rank == 0 or for_rank_0:
            self.wait_until(self.lines, ANSWER)
            lines = [
                self.store.get(key).decode() if self.store.check([key]) else f"rank {rank}{SILENT}"
                for rank, key in enumerate(self.lines)
            ]
            unsure = any(line.endswith((BUSY, SILENT)) for line in lines)
            if unsure:
                lines.append("If it was only slow: --timeout SECONDS, in front of the script, waits longer, but not")
                lines.append("in a group for which new_group was given a timeout of its own.")
                lines.append("If a worker of a DataLoader hangs: update Python 3.10 or 3.11, or give the DataLoader")
                lines.append('multiprocessing_context="spawn", and the script an `if __name__ == "__main__":`.')
            lines += [
                "All ranks have to reach the same collectives: give them equally many batches, and all-reduce what",
                "decides. If one rank evaluates alone, let it call `ddp.module`: a call of the wrapper may be one.",
            ]
            if all(lines):
                word = "suspicion" if unsure else "mistake"
                self.say(f"{word}: ranks have waited for others in vain", "", *lines)
            self.store.set("explained", "")

    def tell(self, place):
        """Leave in the store, once, where this rank is; nothing if the script has raised."""
        if not self.told:
            line = f"rank {self.rank}, after {self.steps} optimizer steps: {place}"
            self.store.set(self.lines[self.rank], line if place else "")
            if self.rank == 0 and not place:  # the script has raised, and there is nothing to explain
                self.store.set("explained", "")
        self.told = True

    def wait_until(self, keys, seconds):
        end = time.monotonic() + seconds
        while not (there := self.store.check(keys)) and time.monotonic() < end:
            time.sleep(0.05)
        return there

    def conclude(self, error):
        """Print the last line."""
        before = " before the error" * (error is not None)
        found = f"nothing found{before} (what it cannot see: --help)"
        if next(self.number["DDP"]) > 1 and not self.passes:
            found = f"no forward pass through DDP was seen{before}, and nothing else found"
        if not self.steps:
            found = f"no optimizer step was seen{before}, and nothing else found"
        if self.failed:
            found = "my own error has ended the looks"
        if self.said:
            found = f"{len(self.said)} finding{'s' * (len(self.said) > 1)}: {'; '.join(self.said)}"
        line = f"{self.steps} optimizer steps, {self.passes} forward passes through DDP: {found}"
        if self.watcher is None:
            alone = os.environ.get("WORLD_SIZE", "1") == "1"
            why = "one process (torchrun starts more)" if alone else f"no process group was made{before}"
            why = "the script has started its processes by itself, not by torchrun" if self.spawned else why
            line = f"{why}, so there was nothing to compare"
        line += " (sharded parameters were not compared)" * self.sharded
        line += " (after a `Join`, weights were not compared)" * self.joined
        if self.steps and not self.passes and next(self.number["loader"]) == 1:
            line += " (no batches were seen)"
        if os.environ.get("RANK", "0") == "0":
            self.stderr.write(f"doctor: {line}\n")


CHECKS = collections.defaultdict(list)  # by place


def check(place, compare, word="mistake"):
    """Register a function that returns a kind, and facts by name, compared where kinds are equal.

    Its docstring is what is printed, what to do, and where that happened.
    """

    def register(look):
        CHECKS[place].append((look, compare, word))
        return look

    return register


def differ(mine, *others):
    """Return the names of facts of which ranks have different values, with those if numbers."""
    found = {}
    for rank, facts in enumerate(others, 1):
        # Where one rank alone has a module around the model, its names are longer.
        if len(mine) == len(facts) and all(map(one_has_a_prefix, mine, facts)):
            facts = dict(zip(mine, facts.values(), strict=True))
        for name, value in mine.items():
            if facts.get(name, value) != value:
                text = f" {value} on rank 0, {facts[name]} on rank {rank}"
                found[name] = name + text * isinstance(value, (int, float))
    return list(found.values())


def one_has_a_prefix(name, other):
    return name.endswith(f".{other}") or other.endswith(f".{name}")


def alike(mine, *others):
    return [name for name in mine if all(mine[name] == facts.get(name) for facts in others)]


def on_any(*ranks):
    return sorted({name for facts in ranks for name in facts})


def common(*ranks):
    """Return the names of lists of whose first halves ranks have many in common, in any order.

    The second half may be of another epoch, in which each rank has samples that were another's. Where
    W ranks draw their shares in orders of their own, two have about 1 / 2W in common: half of it is enough.
    """
    found, enough = set(), 1 / 4 / len(ranks)
    for mine, facts in itertools.combinations(ranks, 2):
        for name in mine.keys() & facts.keys():
            low, length = map(min, zip(mine[name][:2], facts[name][:2], strict=True))
            ours, theirs = (
                {value for value, place in part[name][2] if value < low and place < length // 2}
                for part in (mine, facts)
            )
            found |= {name} if len(ours & theirs) >= max(8, enough * min(len(ours), len(theirs))) else set()
    return sorted(found)


def overlap(*ranks, part=0.5):
    """Return the names of lists of which two ranks have a half in common, or another part, one perhaps ahead."""
    found = set()
    for mine, facts in itertools.combinations(ranks, 2):
        for name in mine.keys() & facts.keys():
            places = {value: i for i, value in enumerate(facts[name])}
            ahead = {value: i - places[value] for i, value in enumerate(mine[name]) if value in places}
            most = max(collections.Counter(ahead.values()).values(), default=0)
            found |= {name} if most >= max(3, len(mine[name]) * part) else set()
    return sorted(found)


@check("optimizer", differ)
def weights(state, params):
    """the ranks' weights differ
    The cause is probably one of these: a pass calls the model, not the wrapper; layers were unfrozen or added after
    wrapping; a step does not use all layers; only one rank has loaded the weights or the optimizer's state;
    no_sync() covers the last forward pass of a step; backward() is called twice after one forward pass;
    torch.autograd.grad is called, not backward(); weights or gradients are changed by numbers that differ by rank;
    ranks decide by themselves to skip a step or to leave a loop.
    jingyaogong/minimind#853, moojink/openvla-oft#160"""
    kind = [state.rates, state.groups]  # where learning rates differ, weights have to
    return kind, {} if state.sharded else tensors(zip(state.names, params, strict=False))[1]


@check("optimizer", differ)
def learning_rates(state, params):
    """the learning rates differ
    Of a checkpoint, load optimizer and scheduler on all ranks. Call `scheduler.step()` on all, with what is equal
    on all: all-reduce a loss before that, and all that decides when a loop ends.
    """
    return state.steps, {f"of group {i}:": rate for i, rate in enumerate(state.rates)}


@check("optimizer", differ)
def step_counts(state, params):
    """ranks have taken unequal numbers of optimizer steps
    Give all ranks equally many batches; skip a step on all ranks or on none."""
    return "", {f"of {state.key.split()[0]}": state.steps}


@check("optimizer", alike, "suspicion")
def random_numbers(state, params):
    """all ranks draw the same random numbers
    If ranks share what is drawn, as an order of which each takes its part, or one rank broadcasts it, it is right:
    draw it from a generator of its own. If it makes noise, dropout or data: torch.manual_seed(hash((seed, epoch,
    rank))), after the model is made and after any other seed; random.seed and, modulo 2**32, numpy.random.seed, too.
    threestudio-project/threestudio#195, Shark-NLP/DiffuSeq#37"""
    # Once may be a decision of all.
    return "", {name: drawn for name, drawn in state.draws.items() if len(drawn) == 3}


@check("batches", overlap)
def batches(name, hashes):
    """ranks get the same batches
    Where they come from a data set, give each rank its own: a DistributedSampler, without rank= or with that among
    all ranks, or a share of an IterableDataset. Where they are drawn, as noise or windows of a text, give each rank a
    seed of its own.
    Wuziyi616/nerv#1, Boese0601/MagicDance#55, Smith42/astroPT#61, huggingface/datasets#5360"""
    # Batches that come back, as of a few short texts, may be the same by chance. If all are one, each counts.
    by_chance = 1 < len({*hashes}) < len(hashes)
    return "", {} if by_chance else {name: [f"{x} {hashes[:i].count(x)}" for i, x in enumerate(hashes)]}


@check("loader", functools.partial(overlap, part=0.9), "suspicion")
def integers(batches):
    """ranks get the same integers, such as labels or indices
    If they are those of samples, these are the same: give each rank a share of its own. If they are drawn, as
    negatives are: a seed of its own. It is right if all share them on purpose, as dates or samples to augment, or
    if neighbours in a sorted order have the same."""
    # What comes back from batch to batch, such as a task, does not tell of samples; nor do numbers of which none
    # comes back, as they may count the samples of a share.
    found = {name: hashes for name, hashes in batches.integers.items() if len({*hashes}) == len(hashes) > 7}
    numbers = {name for name, values in batches.values.items() if len({*values}) == len(values)}
    return "", {f"batch{name} in {batches.name}": hashes for name, hashes in found.items() if name not in numbers}


@check("inputs", common, "suspicion")
@check("loader", common, "suspicion")
def samples(batches):
    """ranks go through the same samples, perhaps in other orders
    Give each a share: a DistributedSampler, whose data set, seed and epoch are the same on all ranks. Of an
    IterableDataset, or in a sampler of your own: every W-th of one order that is the same on all W ranks. If they
    are drawn, as noise: give each a seed of its own."""
    return "", batches.facts()


@check("tensors", differ, "suspicion")
def plain_tensors(model, state):
    """tensors that DDP does not see to differ
    If they should be equal, begin with equal ones, and all-reduce the sums and counts of each batch before you
    update them. If training does not use them, or only rank 0 does, it is right.
    leggedrobotics/rsl_rl#226"""
    alone = [] if state.copied else own_buffers(model)
    return tensors([*alone, *(x for x in plain_attributes(model) if x[0] in state.plain)])


@check("copies", differ, "suspicion")
def copies(model, owned, before):
    """copies of the model differ by rank, such as an average of its weights (EMA)
    Copy the model after DDP has wrapped it, as only then are the weights equal, and update the copies on all ranks.
    Of a checkpoint, load them on all ranks.
    If only one rank uses its copy, it is right."""
    shapes, now = [[*p.shape] for p in model.parameters()], {}
    for other in [x for x in gc.get_objects() if type(x) is type(model) and x is not model]:
        with contextlib.suppress(Exception):  # as some modules are not whole
            params = [p for p in other.parameters() if has_bytes(p) and id(p) not in owned]
            if [[*p.shape] for p in params] == shapes:
                now[id(other)] = digest(params, head=None)
    # What does not change may be another model, whose turn has not come.
    changed = sorted(value for key, value in now.items() if before.get(key, value) != value)
    before.update(now)
    return [shapes, len(changed)], {type(model).__name__: changed}


@check("buffers", differ)
def buffers(model):
    """buffers differ by rank
    All-reduce the sums and counts of each batch before you update them, or all-gather what a queue takes. (DDP
    would take rank 0's statistics, and drop the others'.) Broadcast what is drawn, such as restarted codes.
    Denys88/rl_games#363, lucidrains/vector-quantize-pytorch#17"""
    shapes, hashes = tensors(own_buffers(model))
    return [*shapes.values()], hashes


@check("buffers without DDP", differ, "suspicion")
def buffers_without_ddp(model):
    """buffers differ by rank
    All-reduce the sums and counts of each batch before you update them, or all-gather what a queue takes.
    If training does not use them, and rank 0's are enough, as StyleGAN's average for its samples, it is right."""
    return buffers(model)


@check("random_split", differ)
def splits(kind, indices):
    """random_split differs by rank, so that one validates on what another trains on
    Pass it generator=torch.Generator().manual_seed(0).
    Lightning-AI/pytorch-lightning#7728, #18638"""
    return kind, {f"{kind[0]} samples": indices}


@check("DataLoader", alike)
def shuffling_loaders(dataset):
    """ranks go through the same samples, perhaps in other orders
    Give each a share: sampler=DistributedSampler(dataset) without shuffle=True, and set_epoch."""
    known, hashed = contents(dataset)
    return "", {described(dataset): hashed} if known else {}


@check("DataLoader", alike, "suspicion")
def shuffling_loaders_of_unknown_samples(dataset):
    """ranks may go through the same samples, perhaps in other orders
    If no rank has samples of its own: sampler=DistributedSampler(dataset), not shuffle=True, and set_epoch. In place
    of SubsetRandomSampler(indices): dataset = Subset(dataset, indices)."""
    known, hashed = contents(dataset)
    return "", {described(dataset): hashed} if not known else {}


@check("data set", differ)
def samplers(sampler):
    """a DistributedSampler is not the same on all ranks, so that shares overlap
    Give it the same seed on all ranks.
    NVlabs/LongLive#71, open-mmlab/mmengine#142"""
    found = sampler.shuffle and sampler.num_replicas == dist.get_world_size()
    return "", {f"of {described(sampler.dataset)}, seed": sampler.seed} if found else {}


@check("data set", alike)
def shares(sampler):
    """a DistributedSampler gives all ranks the same share
    Make it without rank=, or with that among all ranks, dist.get_rank()."""
    found = sampler.num_replicas == dist.get_world_size()
    name = f"of {described(sampler.dataset)}: that of rank {sampler.rank}"
    return contents(sampler.dataset)[1], {name: ""} if found else {}


@check("data set", differ, "suspicion")
def data_sets(sampler):
    """the data set of a DistributedSampler differs by rank
    If in order or number, shares overlap; if in names of classes, labels differ: sort and split alike, and draw by
    one seed. If each rank has a share of its own, use shuffle=True, as a DistributedSampler takes only a part of it,
    and equally many steps."""
    if sampler.num_replicas != dist.get_world_size():
        return "", {}
    dataset = sampler.dataset
    entries = listed(types.SimpleNamespace(entries=dataset), type(dataset).__name__, depth=0)
    return "", {"samples:": len(dataset), **entries, **listed(dataset, seen=LISTED)}


@check("order", on_any)
def same_order(sampler, again, evaluates):
    """a DistributedSampler gives the same order in two epochs
    Before each pass: sampler.set_epoch(number of the pass), or that + 1, where a loader's workers are a pass ahead.
    If the sampler's class is yours: let __iter__ shuffle by seed + epoch.
    lucidrains/DALLE-pytorch#230, kan-bayashi/ParallelWaveGAN#177, ultralytics/yolov5#6741"""
    found = again and sampler.shuffle
    return "", {described(sampler.dataset): ""} if found else {}


@check("order", alike, "suspicion")
def repeated_samples(sampler, again, evaluates):
    """a DistributedSampler repeats samples in an evaluation
    If they count: sampler=range(rank, len(dataset), world_size), and sums that are all-reduced after the loop.
    roboflow/rf-detr#1507, facebookresearch/deit#24"""
    repeated = sampler.total_size - len(sampler.dataset)
    found = repeated > 0 and evaluates
    return "", {f"{repeated} of {described(sampler.dataset)}": ""} if found else {}


@check("schedules", alike, "suspicion")
def schedule_lengths(schedules, passes, epochs):
    """a schedule has not the length of the run
    If the run was not stopped early: give it the number of optimizer steps, and call its step() once for each. W
    ranks take W times fewer steps than one, and accumulation takes fewer, too. By default, Accelerate calls step() W
    times if it has prepared the scheduler: then give it W times as many.
    huggingface/diffusers#3954, Lightricks/LTX-Video-Trainer#67"""
    wrong, world = {}, dist.get_world_size()
    # With accumulation, a step has several passes. (With a GAN, it may have one and a half.)
    factors = [world, passes, world * passes] if passes > 1.5 else [world]
    for (name, length, steps, warm_up), factor in itertools.product(schedules.values(), factors):
        rounding = min(epochs * (factor - 1), steps * factor / 10)  # each epoch is rounded to whole steps
        length = last_step(length, steps, factor, rounding) if callable(length) else length
        for before in (0, warm_up):
            # Is it as long as W times these steps, or as a W-th of them, up to a few, and not as these?
            long, made = length + before, steps + before
            few = max(factor, 0.03 * long)
            longer, shorter = abs(long - made * factor), abs(long - made / factor)
            close = longer <= max(few, rounding) or shorter <= max(few, rounding / factor)
            close = close and min(longer, shorter) < abs(long - made)
            if length and steps > 3 and max(long, made) > 15 and close:
                wrong[f"{name} of {length} steps has made {steps}"] = ""
    return "", wrong


def last_step(factor, steps, world, rounding=0):
    """Return where a function comes down to 0, if that is near W times these steps, or near a W-th; else 0."""
    with contextlib.suppress(Exception):  # of the script's function
        for middle, off in ((steps / world, rounding / world), (steps * world, rounding)):
            around = range(max(1, round(middle - off)), round(middle + off) + 1)
            end = min(around, key=lambda step: abs(factor(step)))
            *before, last = (abs(factor(end * i // 50)) for i in range(51))
            # It may restart, or be an exponential one, which only passes by.
            restarts = max(abs(factor(end + 1 + end * i // 99)) for i in range(10)) > max(before) / 2
            later = factor(end + end // 8)
            passes = not isinstance(later, complex) and 0 < later <= last
            reached = end < steps or abs(factor(steps)) > 0.2 * max(before)
            if before[-1] and last < 0.01 * max(before) and reached and not restarts and not passes:
                return end
    return 0


def equal(order, other):
    try:
        return order == other
    except (RuntimeError, ValueError):  # of tensors or arrays
        return digest(order) == digest(other)


def parameters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def norms(optimizer):
    """Return what tells whether parameters have changed, also through `.data`, which torch does not count."""
    params = [p.detach() for p in parameters(optimizer) if has_bytes(p) and (p.is_floating_point() or p.is_complex())]
    return torch._foreach_norm(params) if params else ()


def owner_and_names(params):
    """Return the outermost module that has the first parameter, and names for all of them."""
    owner, names = None, {id(p): ("", "") for p in params}
    for module in [x for x in gc.get_objects() if issubclass(type(x), torch.nn.Module)]:
        if isinstance(module, DistributedDataParallel):
            continue
        with contextlib.suppress(Exception):  # as some modules are not whole
            for name, p in module.named_parameters():
                name = name.replace("_orig_mod.", "")
                if len(name) > len(names.get(id(p), [name])[0]):
                    names[id(p)] = name, type(module).__name__
                    owner = module if p is params[0] else owner
    names = [name if "." in name else f"{kind or 'tensor'}.{name}".strip(".") for name, kind in names.values()]
    extra = ["" if names.count(name) == 1 else f" (parameter {i})" for i, name in enumerate(names)]
    return owner, list(map("".join, zip(names, extra, strict=True)))


def plain_attributes(model):
    """Yield names and values of the tensors and arrays that are no parameters and no buffers."""
    for prefix, part in model.named_modules():
        # torchmetrics adds them up when it computes; the older spectral norm makes weights of its vectors.
        metric = any(x.__module__.startswith("torchmetrics.") for x in type(part).__mro__)
        if metric or known_to_torch(part):
            continue
        for name, value in vars(part).items():
            if has_bytes(value) and not getattr(value, "requires_grad", False):
                yield f"{prefix}.{name}".strip("."), value


def own_buffers(model):
    """Yield names and buffers, but not those of BatchNorm, be it compiled, of which rank 0's are enough."""
    for name, part in model.named_modules():
        own = dict(part.named_buffers(recurse=False))
        if not known_to_torch(part) and "num_batches_tracked" not in own:
            yield from part.named_buffers(name, recurse=False)


def known_to_torch(module):
    """Return whether it has ranges of quantization-aware training, or spectral norm's vectors."""
    owners = [module, *module._forward_pre_hooks.values()]  # the older spectral norm is a hook
    return any(type(x).__module__.startswith(("torch.ao.", "torch.nn.utils.")) for x in owners)


class Batches:
    """What a loader yields, or DDP is given: hashes of 255 batches, of their integers, of samples of 5,000 batches."""

    def __init__(self, name):
        self.name, self.number = name, 0
        self.hashes, self.integers, self.values = [], collections.defaultdict(list), collections.defaultdict(list)
        self.samples = collections.defaultdict(Samples)
        self.first, self.constant = set(), set()

    def add(self, batch):
        self.number += 1
        inside = opened(batch) if self.number <= 255 else ()
        whole = tree_leaves(inside)
        if any(isinstance(x, torch.Tensor) and differs_within(x) for x in whole):
            self.hashes.append(digest(whole))
        # That of transformers is a UserDict.
        leaves = named_tensors(tree_map(lambda x: dict(x) if isinstance(x, collections.UserDict) else x, batch))
        # Labels and tokens tell of samples that each rank augments in its own way. Each tensor counts by
        # itself, as others, such as images of bytes, may be augmented; small ones, as of boxes, together.
        both = {**named_tensors(inside), **leaves}
        integers = {name: x for name, x in both.items() if not x.is_floating_point()}
        large = {name: x for name, x in integers.items() if x.numel() >= 8}
        small = {" (small tensors)": [x for name, x in integers.items() if name not in large]}
        for name, part in {**large, **small}.items() if self.number <= 255 else ():
            if tell_of_samples(part):
                self.integers[name].append(digest(part))
            if not isinstance(part, list) and part.dim() == 1 and len(self.values[name]) < 5000:
                self.values[name] += part.tolist()
        # What is the same in the first two batches, such as the edges of one graph, does not tell their size.
        if self.number <= 2:
            hashed = {(name, digest(x)) for name, x in leaves.items()}
            self.constant, self.first = {name for name, _ in hashed & self.first}, hashed
            if self.constant:
                self.samples.clear()
        # Most tensors of a batch have a row for each sample; a mask for all of them has not.
        sizes = collections.Counter(len(x) for name, x in leaves.items() if x.dim() and name not in self.constant)
        size = max(sizes, key=sizes.get, default=0)
        parts = {name: x for name, x in leaves.items() if x.dim() and x.numel() and len(x) == size}
        parts = {name: x for name, x in parts.items() if not is_mask(x)}  # it is wider where another sample is longer
        together = {"samples": [*parts.values()]}
        if any(x.is_floating_point() or x.dim() > 2 for x in parts.values()):  # perhaps augmented, but texts are not
            texts = {name: x for name, x in parts.items() if x.dim() == 2 and not x.is_floating_point()}
            together |= {f"batch{name}": [x] for name, x in texts.items() if x.shape[1] >= 8}
        for name, columns in together.items() if self.number <= 5000 else ():
            if any(x.dim() > 1 for x in columns) and not self.samples[name].repeats:
                rows = zip(*map(hashes_of_rows, columns), strict=True)
                self.samples[name].add([hash(row) & (2**62 - 1) for row in rows])

    def facts(self):
        return {f"{name} in {self.name}": samples.facts() for name, samples in self.samples.items()}


class Samples:
    """The 500 or so of the lowest hashes, which on all ranks are of the same samples, each with its place."""

    def __init__(self):
        self.kept, self.below, self.place, self.repeats = {}, 2**62, 0, False

    def add(self, hashes):
        # From a repetition on, it may be another epoch, in which a rank has what was another's.
        kept = [(value, i) for i, value in enumerate(hashes, self.place) if value < self.below]
        self.repeats = len({*self.kept, *dict(kept)}) < len(self.kept) + len(kept)
        if not self.repeats:
            self.place += len(hashes)
            self.kept.update(kept)
        while len(self.kept) > 500:
            self.below //= 2
            self.kept = {value: i for value, i in self.kept.items() if value < self.below}

    def facts(self):
        return [self.below, self.place, [*self.kept.items()]]


def named_tensors(batch):
    try:
        leaves = {keystr(path): x for path, x in tree_flatten_with_path(batch)[0]}
    except ValueError:  # of a class that gives no names, as in transformers 4
        leaves = {f"[{i}]": x for i, x in enumerate(tree_leaves(batch))}
    return {name: x for name, x in leaves.items() if isinstance(x, torch.Tensor) and has_bytes(x)}


def tell_of_samples(integers):
    """Return whether ranks with other samples have other integers: not a task, a mask, or positions."""
    if isinstance(integers, list):
        return sum(x.numel() for x in integers) >= 8 and any(x.numel() > 1 for x in integers)
    others = integers[integers != integers.flatten()[0]]
    mask = integers.dim() > 1 and not (others != others[:1]).any()
    return bool((integers != integers[:1]).any()) and not mask


def is_mask(x):
    """Return whether these are two-valued integers in rows, as of padding, or of segments."""
    if x.dim() != 2 or x.is_floating_point() or x.is_complex():
        return False
    x = x.long()
    return not ((x != x.min()) & (x != x.max())).any()


def differs_within(x):
    """Return whether it may tell samples apart, unlike one number for all, or a benchmark's zeros."""
    return has_bytes(x) and x.numel() > 1 and (len(x) == 1 or bool((x != x[:1]).any()))


def opened(thing, depth=4):
    """Return it with the attributes of an object, such as a graph, in its place, if all that they hold is known."""

    def inside(leaf):
        parts = leaf if isinstance(leaf, (dict, collections.UserDict)) else getattr(leaf, "__dict__", None)
        if not parts or not depth or isinstance(leaf, CLOSED):
            return leaf
        parts = opened(dict(parts), depth - 1)
        known = all(has_bytes(x) or isinstance(x, (*SIMPLE, Dataset)) or callable(x) for x in tree_leaves(parts))
        return parts if known else leaf

    return tree_map(inside, thing)


def hashes_of_rows(tensor):
    """Return a number below 2**62 for each row, from 4,096 of its numbers, or 256 of an image's."""
    draw = torch.Generator().manual_seed(0)
    rows = tensor.detach().as_subclass(torch.Tensor).reshape(len(tensor), -1)
    rows = torch.view_as_real(rows.resolve_conj()).flatten(1) if rows.is_complex() else rows.resolve_neg()
    rows = rows.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.dtype.itemsize])
    if tensor.dim() == 2:  # perhaps of tokens, with padding, which is not the sample's
        rows = rows[:, :4096]
        padding = (rows == rows[:, -1:]).flip(1).cumprod(1).flip(1).bool()
        padding &= padding.sum(dim=1, keepdim=True) > 1  # or it is the last token of the longest sample
        rows = rows.masked_fill(padding, 0)
    else:
        rows = rows[:, torch.randint(rows.shape[1], (256,), generator=draw).to(rows.device)]
    factors = torch.randint(2**62, (4096,), generator=draw)[: rows.shape[1]]
    mixed = (rows.cpu().long() * factors).sum(dim=1)
    mixed = (mixed ^ (mixed >> 31)) * 0x1B873593CC9E2D51  # so that low hashes are of any rows
    return ((mixed ^ (mixed >> 29)) & (2**62 - 1)).tolist()


def random_states():
    """Return, by name, hashes of the states of what draws random numbers; "" is that of a seed not drawn from."""
    found = {}
    for g in (torch.default_generator, *torch.cuda.default_generators):
        state = digest(g.get_state())
        found[f"torch's ({g.device})"] = state if state != seeded(g.device, g.initial_seed()) else ""
    python = random.getstate()
    new = python[1][0] == 2**31 and python[1][-1] == 624  # as random.seed() leaves them
    found["Python's random"] = "" if new else digest(repr(python))
    if numpy := sys.modules.get("numpy"):
        state = numpy.random.get_state(legacy=False)
        key, position = (state["state"].get(name) for name in ("key", "pos"))  # of other kinds, there are none
        new = position == 624 and numpy.array_equal(key, numpy.random.RandomState(key[0]).get_state()[1])
        new = new or (position == 624 and key[0] == 2**31)  # as a list of seeds leaves it
        found["NumPy's"] = "" if new else digest(state)
    return found


@functools.lru_cache
def seeded(device, seed):
    return digest(torch.Generator(device).manual_seed(seed).get_state())


def drawn_between(before, after):
    """Return, by name, the hashes of what has drawn. A new seed is no draw."""
    return {name: state for name, state in after.items() if state not in ("", before.get(name, state))}


def due(count):
    """Return whether there is a look at what is this number of its kind."""
    return count in (3, "its end", "the end") or count & (count - 1) == 0 or count % 100 == 0


def listed(dataset, prefix="", depth=3, seen=None):
    """Return hashes, by name, of the lists, tables, arrays and label maps of a data set, and of those within it."""
    if seen is not None and isinstance(dataset, Dataset):
        if seen.get(id(dataset)) is dataset:  # since then, it may have kept what this rank has read
            return {}
        seen[id(dataset)] = dataset  # not by a hash, which a dataclass has not
    found, prefix = {}, prefix or type(dataset).__name__
    few = isinstance(dataset, dict) and len(dataset) < 100  # of columns, say, not of samples
    for name, value in (dataset if few else getattr(dataset, "__dict__", {})).items():
        with contextlib.suppress(Exception):  # of what cannot be read so
            parts = value if isinstance(value, (list, tuple)) and len(value) < 100 else [value]
            for i, part in enumerate(parts):
                if depth and hasattr(part, "__getitem__"):
                    found |= listed(part, f"{prefix}.{name}" + f"[{i}]" * (part is not value), depth - 1, seen)
            if hasattr(value, "iloc"):  # of pandas
                value = value.iloc[:1000].to_numpy().tolist()
            elif name == "_indices" and hasattr(value, "slice"):  # of Hugging Face's data sets: the rows
                value = value.slice(0, 1000).column(0).to_pylist()
            elif hasattr(value, "tolist") and not (has_bytes(value) or isinstance(value, torch.Tensor)):
                value = value[:1000].tolist()  # of texts, in NumPy's or pandas' arrays
            elif isinstance(value, dict) and len(value) <= 10_000:  # of classes and their numbers
                numbers = any({*map(type, part)} == {int} for part in (value, value.values()))
                value = sorted(value.items(), key=str) if numbers else []
            if isinstance(value, (list, tuple)):
                value = entries(value[:1000])
            if has_bytes(value) or (isinstance(value, (list, range)) and value):
                found[f"{prefix}.{name}"] = digest(value)
    return found


def entries(rows):
    """Return, in one list, what tells rows from others on all ranks: of paths, not the folder of a rank."""
    found = tree_leaves([simple_parts(leaf) for leaf in tree_leaves(rows)])
    width = max(1, len(found) // max(1, len(rows)))
    for i in range(width):
        texts = [x for x in found[i::width] if isinstance(x, str)]
        start = len(os.path.commonprefix(texts))  # noqa: RUF071 (some are no paths)
        found[i::width] = [x[start:] if isinstance(x, str) else x for x in found[i::width]]
    return found


def simple_parts(leaf):
    if isinstance(leaf, os.PathLike):
        return os.fspath(leaf)
    values = getattr(leaf, "__dict__", {}).values()
    return [simple_parts(x) for x in values if isinstance(x, SIMPLE)] or leaf


def described(dataset):
    size = f"{len(dataset)} samples of " if hasattr(dataset, "__len__") else ""
    return size + type(dataset).__name__


def contents(dataset):
    """Return whether a data set's samples are surely those of what it has, and a hash of that."""
    with contextlib.suppress(Exception):  # of what is not there, or cannot be a key
        return CONTENTS[dataset]
    parts = dataset if has_bytes(dataset) else getattr(dataset, "__dict__", {"": dataset})
    if isinstance(parts, dict):
        short = {k: x[:10_000] for k, x in parts.items() if isinstance(x, (list, tuple))}
        parts = {**parts, **short}
    leaves = tree_leaves(parts)
    known = type(dataset).__module__.startswith(KNOWN)  # any other class may draw them, or read them elsewhere
    # Numbers may stand for samples that are elsewhere.
    known &= not isinstance(dataset, (range, list)) or any(type(x) is not int for x in dataset[:1000])
    known &= all(has_bytes(x) or isinstance(x, SIMPLE) or callable(x) for x in leaves)
    found = known and 0 < len(leaves) <= MOST_LEAVES, digest([listed(dataset), leaves])
    with contextlib.suppress(Exception):
        CONTENTS[dataset] = found
    return found


CONTENTS, LISTED = weakref.WeakKeyDictionary(), weakref.WeakValueDictionary()


def tensors(pairs):
    """Return shapes and hashes by name."""
    found = {name: value for name, value in pairs if has_bytes(value)}
    shapes = {name: [*value.shape] for name, value in found.items()}
    return shapes, {name: digest(value, head=None) for name, value in found.items()}


def has_bytes(value):
    """Return whether it is a tensor or an array: not one that is sharded (DTensor) or sparse."""
    if isinstance(value, torch.Tensor):
        plain = type(value).__torch_dispatch__ == torch.Tensor.__torch_dispatch__
        plain &= value.layout is torch.strided and not isinstance(value, UninitializedTensorMixin)
        return plain and not (value.is_meta or value.is_quantized or value.is_nested)
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufSU"


def digest(thing, head=100_000):
    """Return a hash of what is in lists and dicts: of a large tensor, of numbers all over it."""
    hashed = hashlib.sha256()
    for leaf in itertools.islice(tree_leaves(thing), MOST_LEAVES):
        if not has_bytes(leaf):
            data = repr(leaf if isinstance(leaf, SIMPLE) else type(leaf)).encode() + b"\n"
        elif isinstance(leaf, torch.Tensor):
            step = 1 if head is None else max(1, leaf.numel() // head)
            flat = leaf.detach().as_subclass(torch.Tensor).reshape(-1)[::step]
            flat = flat.cpu().resolve_conj().resolve_neg().contiguous()
            data = ctypes.string_at(flat.data_ptr(), flat.nbytes)
        else:
            step = 1 if head is None else max(1, leaf.size // head)
            step = 1 if hasattr(leaf, "filename") else step  # a memmap, of which the start is read
            data = leaf.flat[: head and head * step : step].tobytes()
        hashed.update(data)
    return hashed.hexdigest()[:16]


def waits(line):
    """Return whether this innermost line is one of a collective, or waits for one."""
    of_torch = re.search(r"torch.(distributed|nn.parallel|autograd)\b", line.filename)
    return bool(of_torch or re.search(r"\bwait\(", line.line or ""))


def computes():
    """Return whether the main thread is at work, as in a backward pass of a model of its own, and waits for nothing."""
    if not hasattr(time, "pthread_getcpuclockid"):  # as on macOS
        return False
    clock = time.pthread_getcpuclockid(threading.main_thread().ident)
    before = time.clock_gettime(clock)
    time.sleep(0.2)
    return time.clock_gettime(clock) - before > 0.02


def script_lines(lines):
    """Return the outermost and the innermost of these lines that are in the script's own files."""
    above = __file__, "run_script"
    start = sum(i for i, x in enumerate(lines, 1) if (x.filename, x.name) == above)
    own = [x for x in lines[start:] if not x.filename.startswith(LIBRARIES)]
    texts = [f"{os.path.basename(x.filename)}:{x.lineno}, in {x.name}: {x.line}" for x in own]
    return " ... ".join(dict.fromkeys(texts[:1] + texts[-1:])) or "outside the script"


if __name__ == "__main__":
    main()

"""Recording, on the CPU, of what a rank submits to its GPU: kernels, waits and messages, each on its stream.

`recording()` stands in for `torch.cuda`'s streams and events and for torch.distributed's messages. Code in it runs as
it does on the CPU, and every operator of torch counts as a kernel on the current stream. Messages go to the stream of
their communicator, which waits for the current stream, as ProcessGroupNCCL has it; `wait()` makes the current stream
wait for them.
"""

import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.distributed import collectives
from megatron_ext.experimental.pipeline_vocabulary import side_stream

# Files in which a line says nothing of whose work it is.
_RECORDING = ("/tests/streams/recording.py", "/tests/streams/memory.py", "/tests/streams/stage_recording.py")
_NOT_THE_CODE = (*_RECORDING, "/distributed/collectives.py", "/megatron_on_cpu/", "/contextlib.py", "/torch/")


@dataclass(frozen=True)
class Message:
    """Message that ranks of a group launch together.

    Attributes:
        group: its name and its ranks in the job.
        kind: "send" and "receive" between this rank and `peer` (a rank in the job); else the name of a collective, with
            its root, or -1, as `peer`.
        nbytes: of this rank's tensor.
    """

    group: tuple[str, tuple[int, ...]]
    kind: str
    peer: int
    nbytes: int

    @property
    def to_one_rank(self) -> bool:
        return self.kind in ("send", "receive")


@dataclass
class Submission:
    """One entry of a rank's program.

    Attributes:
        what: "kernel", "message", "wait" (a stream's) or "host wait".
        stream: the number of the stream of a kernel or a wait; of a message the stream that it was launched from.
        after: what a message's communicator, a wait or the host waits for: numbers of this rank's submissions.
        line: of the code.
    """

    what: str
    stream: int
    line: str
    after: tuple[int, ...] = ()
    message: Message | None = None


class Stream:
    """Stands in for `torch.cuda.Stream`."""

    def __init__(self, log: "Log", *_: Any, **__: Any):
        self.log, self.number = log, next(log.numbers)
        self.last: int | None = None  # the last submission on it
        self.device, self.cuda_stream = torch.device("cpu"), self.number

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: "Event") -> None:
        self.log.wait(self, event.after)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event(self.log)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.log.host_wait(() if self.last is None else (self.last,))


class Event:
    """Stands in for `torch.cuda.Event`."""

    def __init__(self, log: "Log", *_: Any, **__: Any):
        self.log, self.after = log, ()

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.log.current
        self.log.open = None
        self.after = () if stream.last is None else (stream.last,)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.log.current).wait_event(self)

    def synchronize(self) -> None:
        self.log.host_wait(self.after)

    def query(self) -> bool:
        return False  # the GPU is never known to be ahead of the host


class Work:
    """Stands in for what torch.distributed returns: the message is done when the recording goes on without it."""

    def __init__(self, log: "Log", at: int, tensors: list[Tensor], real: Any = None):
        self.log, self.at, self.tensors, self.real = log, at, tensors, real

    def wait(self, *_: Any) -> bool:
        if self.real is not None:
            self.log.aside(self.real.wait)
        self.log.wait(self.log.current, (self.at,))
        self.log.waited(self.at)
        self.tensors = []
        return True

    def is_completed(self) -> bool:
        return False


class Log:
    """Record of the submissions so far. `real`: messages are sent as well, over the group's own backend."""

    def __init__(self, real: bool = False):
        self.real, self.sending = real, False
        self.submissions: list[Submission] = []
        self.numbers = itertools.count()
        self.current = Stream(self)
        self.open: int | None = None  # kernels that follow each other on one stream are one submission

    def aside(self, send: Callable[[], Any]) -> Any:
        """Sends, or waits for what is sent, by what gloo does in the place of a kernel of NCCL."""
        self.sending = True
        try:
            return send()
        finally:
            self.sending = False

    def _add(self, submission: Submission) -> int:
        self.submissions.append(submission)
        return len(self.submissions) - 1

    def kernel(self, reads: list[Tensor], writes: list[Tensor], made: list[Tensor]) -> int:
        stream = self.current
        if self.open is None or self.submissions[self.open].stream != stream.number:
            stream.last = self.open = self._add(Submission("kernel", stream.number, line_of_code()))
        return self.open

    def message(self, message: Message, reads: list[Tensor], writes: list[Tensor]) -> int:
        stream, self.open = self.current, None
        after = () if stream.last is None else (stream.last,)
        return self._add(Submission("message", stream.number, line_of_code(), after, message))

    def wait(self, stream: Stream, after: tuple[int, ...]) -> None:
        if after:
            self.open = None
            stream.last = self._add(Submission("wait", stream.number, line_of_code(), after))

    def host_wait(self, after: tuple[int, ...]) -> None:
        if after:
            self.open = None
            self._add(Submission("host wait", self.current.number, line_of_code(), after))

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Memory that another stream uses."""

    def waited(self, at: int) -> None:
        """Somebody has waited for a message, which lets go of its tensors."""


def line_of_code() -> str:
    """The innermost line that is neither torch's nor the recording's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in _NOT_THE_CODE):
        frame = frame.f_back
    path = frame.f_code.co_filename
    return f"{path[max(path.rfind('/megatron_ext/'), path.rfind('/tests/')) + 1 :]}:{frame.f_lineno}"


class _Kernels(TorchDispatchMode):
    """Every operator that computes is a kernel on the current stream."""

    def __init__(self, log: Log):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if self.log.sending or func.namespace in ("c10d", "prim"):
            return found
        schema = func._schema
        if any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns):
            return found  # a view
        reads, writes = [], []
        for position, argument in enumerate(schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            tensors = [x for x in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(x, Tensor)]
            written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if written else reads).extend(tensors)
        returned = [x for x in (found if isinstance(found, (list, tuple)) else [found]) if isinstance(x, Tensor)]
        made = [x for x in returned if not any(x is other for other in writes)]
        self.log.kernel(reads, writes, made)
        return found


def _group_of(group: Any) -> tuple[str, tuple[int, ...]]:
    group = group or dist.group.WORLD
    return group.group_name, tuple(dist.get_process_group_ranks(group))


_MESSAGES = ["isend", "irecv", "send", "recv", "broadcast", "reduce", "all_reduce", "all_to_all_single"]
_MESSAGES += ["all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor"]
_ONE_WAY = {"isend": "send", "send": "send", "irecv": "receive", "recv": "receive"}


def _message(log: Log, name: str) -> Callable[..., Any]:
    """Stands in for a function of torch.distributed that communicates."""
    original, kind = getattr(dist, name), _ONE_WAY.get(name, name)
    signature = inspect.signature(original)
    start = {"send": dist.isend, "receive": dist.irecv}.get(kind) or functools.partial(original, async_op=True)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        returns = given.pop("async_op", name in ("isend", "irecv"))
        peer = given.get("dst", given.get("src", -1))
        both = [x for x in given.values() if isinstance(x, Tensor)]  # what is written first
        writes, reads = both[:1], both[-1:]
        if kind == "send" or (kind == "broadcast" and peer == dist.get_rank()):
            writes = []
        elif kind in ("receive", "broadcast"):
            reads = []
        if len(both) == 2 and not log.real:
            out, x = both
            out.view(-1).copy_(x.reshape(-1).repeat(-(-out.numel() // max(1, x.numel())))[: out.numel()])
        at = log.message(Message(_group_of(given.get("group")), kind, peer, both[0].nbytes), reads, writes)
        work = Work(log, at, both, log.aside(lambda: start(**given)) if log.real else None)
        if returns:
            return work
        work.wait()
        return None

    return call


def _after(log: Log, read: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """The host reads values when all that is on the current stream is done."""

    def call(tensor: Tensor) -> Any:
        log.current.synchronize()
        return read(tensor)

    return call


@contextmanager
def recording(log: Log) -> Iterator[Log]:
    """Within it, what this thread submits goes to `log`."""

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, log.current = log.current, stream
        try:
            yield
        finally:
            log.current = before

    with ExitStack() as stack:
        patch = lambda owner, name, new: stack.enter_context(mock.patch.object(owner, name, new))  # noqa: E731
        patch(torch.cuda, "Stream", functools.partial(Stream, log))
        patch(torch.cuda, "Event", functools.partial(Event, log))
        patch(torch.cuda, "current_stream", lambda *_: log.current)
        patch(torch.cuda, "stream", on)
        patch(Tensor, "record_stream", lambda tensor, stream: log.record_stream(tensor, stream))
        patch(side_stream, "has_streams", lambda device: True)
        patch(Tensor, "tolist", _after(log, Tensor.tolist))
        messages = {name: _message(log, name) for name in _MESSAGES if hasattr(dist, name)}
        for name, new in messages.items():
            patch(dist, name, new)
        for own, names in (
            ("_all_gather_single", ("all_gather_single", "all_gather_into_tensor")),
            ("_reduce_scatter_single", ("reduce_scatter_single", "reduce_scatter_tensor")),
        ):
            patch(collectives, own, next(messages[name] for name in names if name in messages))
        stack.enter_context(_Kernels(log))
        yield log

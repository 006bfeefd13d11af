"""A group of Ray actors, one a rank, that start, are called and end together.

Ray (https://www.ray.io) starts the processes and carries data and errors; the workers talk to each other by
torch.distributed as they do under torchrun.
"""

import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Self

from megatron_ext.distributed.store_server import loopback_interface, serve_store
from megatron_ext.policy.data.agreement_of_ranks import FailedElsewhere
from megatron_ext.policy.ray.liveness import LOOK_S, PERIOD_S, ActorLocation, Liveness, beating

_POLL_S = LOOK_S / 2
# Seconds that other ranks may go on once one has raised: a worker's errors come on all ranks together.
_GRACE_S = 30.0
LOOPBACK = "127.0.0.1"
_RAY_NAMES = tuple(f"\t{name}: " for name in ("class_name", "actor_id", "name", "namespace"))


@dataclass(frozen=True)
class Timeouts:
    """Limits in seconds: for actors to start and to build their model; for a call (None: no limit); and for an actor to
    be stopped, or all of them to hang (None: not watched)."""

    start_s: float
    call_s: float | None
    heartbeat_s: float | None

    def __post_init__(self) -> None:
        for name, value in (("start_timeout_s", self.start_s), ("call_timeout_s", self.call_s)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value}: it must be positive")
        if self.heartbeat_s is not None and not self.heartbeat_s >= 3 * PERIOD_S:
            raise ValueError(
                f"heartbeat_timeout_s is {self.heartbeat_s}: a beat comes every {PERIOD_S:.0f} s, so it must be "
                f"{3 * PERIOD_S:.0f} or more; or None, to watch nothing"
            )


class RayActors:
    """Ray actors, one on each of `world_size` ranks, each with a worker that `worker_cls(**make)` makes."""

    def __init__(
        self,
        worker_cls: Callable[..., Any],
        make: Mapping[str, Any],
        world_size: int,
        bundle: Mapping[str, float],
        env_vars: Mapping[str, str] | None,
        timeouts: Timeouts,
    ):
        self._ray = import_ray()
        self._worker_cls, self._make, self.world_size = worker_cls, dict(make), world_size
        self._bundle, self._env_vars, self._timeouts = dict(bundle), dict(env_vars or {}), timeouts
        self._actors: list[Any] = []
        self._liveness: Liveness | None = None
        self._placement: Any = None
        self._failure: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def wait(self, begun: list[Any]) -> list[Any]:
        """Wait for calls that were begun, and return their results by rank."""
        return self._collect(begun)

    def is_alive(self, timeout_s: float = 30.0) -> bool:
        """Return whether every actor answers in time. A busy actor does not, and goes on; if one is dead, all end.

        False after `shutdown`, and after a `restart` that failed.
        """
        try:
            return all(self._collect(self._begin("is_alive"), timeout_s))
        except RuntimeError:
            return False

    def restart(self, weights_path: str, optimizer_path: str | None = None) -> None:
        """End the actors, for example after one has died, and start new ones with the weights of a checkpoint."""
        self._kill("restart() ended the actors")
        self._start(weights_path, optimizer_path)

    def shutdown(self) -> None:
        """End the actors and free their resources, whatever they are doing."""
        try:
            if self._failure is None:
                self._collect(self._begin("shutdown"), _GRACE_S)
        except RuntimeError:  # stuck or dead; they are ended anyway
            pass
        finally:
            self._kill("shutdown() ended the actors")

    def _start(self, weights_path: str | None, optimizer_path: str | None) -> None:
        self._failure = None
        try:
            self._make_actors()
            found = self._collect([actor.where.remote() for actor in self._actors], self._timeouts.start_s)
            places, address = [place for place, _ in found], found[0][1]
            if self._timeouts.heartbeat_s is not None:
                self._liveness = Liveness(self._ray, places, self._timeouts.heartbeat_s, self._timeouts.start_s)
            make = self._make | {"weights_path": weights_path, "optimizer_path": optimizer_path}
            monitors = [None] * self.world_size if self._liveness is None else self._liveness.monitors
            given = self.world_size, address, self._worker_cls, make
            begun = [actor.build.remote(rank, *given, monitors[rank]) for rank, actor in enumerate(self._actors)]
            self._collect(begun, self._timeouts.start_s)
        except BaseException as error:
            self._kill(f"the actors did not start: {type(error).__name__}: {error}")
            raise

    def _make_actors(self) -> None:
        """Make the actors, each in its bundle of one placement group."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray = self._ray
        self._placement = placement_group([dict(self._bundle) for _ in range(self.world_size)], strategy="PACK")
        if not self._placement.wait(self._timeouts.start_s):
            raise RuntimeError(
                f"Ray has no room for {self.world_size} actors with {self._bundle} each; it has "
                f"{ray.cluster_resources()}: add nodes, or ask for fewer resources"
            )
        needs: dict[str, Any] = {"num_cpus": self._bundle["CPU"], "num_gpus": self._bundle.get("GPU", 0)}
        # Ray does not hide GPUs from actors that ask for none.
        hidden = {} if self._bundle.get("GPU") else {"CUDA_VISIBLE_DEVICES": ""}
        needs["runtime_env"] = {"env_vars": hidden | self._env_vars}
        places = [PlacementGroupSchedulingStrategy(self._placement, i) for i in range(self.world_size)]
        actor = ray.remote(_Actor)
        self._actors = [actor.options(scheduling_strategy=place, **needs).remote() for place in places]

    def _all(self, method: str, *args: Any) -> list[Any]:
        return self._collect(self._begin(method, *args))

    def _begin(self, method: str, *args: Any) -> list[Any]:
        return self._begin_each(method, [args] * self.world_size)

    def _begin_each(self, method: str, args_by_rank: Iterable[tuple[Any, ...]]) -> list[Any]:
        self._check_alive()
        return [actor.call.remote(method, *args) for actor, args in zip(self._actors, args_by_rank, strict=True)]

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"{self._failure}; call restart(weights_path) to go on from a checkpoint")

    def _collect(self, begun: list[Any], timeout_s: float | None = None) -> list[Any]:
        """Return the results by rank. All actors are ended if one dies, stops or hangs, if one raises while others go
        on, or if the call takes longer than `call_timeout_s`.

        With `timeout_s`, actors that do not answer in time go on, and a RuntimeError names them.
        """
        ray, pending, results = self._ray, list(begun), {}
        began = looked = time.monotonic()
        errors: dict[int, Exception] = {}  # Ray's errors, whose causes are the ranks' own
        limit = self._timeouts.call_s if timeout_s is None else timeout_s
        deadline = math.inf if limit is None else began + limit
        while pending:
            done, pending = ray.wait(pending, timeout=_POLL_S)
            for ref in done:
                rank = begun.index(ref)
                try:
                    results[rank] = ray.get(ref)
                except ray.exceptions.RayTaskError as error:
                    errors[rank] = error
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                except ray.exceptions.RayError as error:
                    self._fail(f"rank {rank} of {self.world_size} died: {_death(error)}")
            if pending and time.monotonic() > deadline:
                self._late([begun.index(ref) for ref in pending], errors, timeout_s)
            if pending and self._liveness is not None and time.monotonic() > looked + LOOK_S:
                looked = time.monotonic()
                if fault := self._liveness.fault([begun.index(ref) for ref in pending], max(deadline - looked, 0.0)):
                    self._fail(fault + _told(errors))
        if errors:
            # A rank on which nothing failed may have answered first.
            rank, sent = min(errors.items(), key=lambda item: isinstance(_own(item[1]), FailedElsewhere))
            own = _own(sent)
            own.add_note(f"on rank {rank} of {self.world_size}")
            raise own from sent  # `sent` shows the traceback on that rank
        return [results[rank] for rank in range(len(begun))]

    def _late(self, ranks: list[int], errors: Mapping[int, Exception], timeout_s: float | None) -> NoReturn:
        """Raise the error for ranks that did not answer in time."""
        what = f"ranks {ranks} of {self.world_size} did not answer"
        doing = "" if self._liveness is None else self._liveness.doing(ranks)
        if errors:
            self._fail(what + _told(errors) + doing)
        if timeout_s is None:
            self._fail(f"{what} within call_timeout_s, {self._timeouts.call_s} s{doing}")
        raise RuntimeError(f"{what} within {timeout_s} s{doing}")

    def _fail(self, what: str) -> NoReturn:
        """End all actors, since some may wait for ever in a collective, and raise RuntimeError."""
        self._kill(what)
        raise RuntimeError(f"{what}. The other workers were ended; restart(weights_path) goes on from a checkpoint")

    def _kill(self, why: str) -> None:
        """End the actors. Every later call raises an error with the first reason since they were started."""
        self._failure = self._failure or why
        for actor in self._actors:
            self._ray.kill(actor)
        if self._liveness is not None:
            self._liveness.end()
        self._actors, self._liveness = [], None
        if self._placement is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self._placement)
            self._placement = None


class _Actor:
    """Actor of one rank, with the rank's worker."""

    def where(self) -> tuple[ActorLocation, tuple[str, int]]:
        """Return this actor's location, and the address at which the ranks of its group can meet."""
        import ray

        place = ActorLocation(ray.get_runtime_context().get_node_id(), platform.node(), os.getpid())
        address = ray.util.get_node_ip_address()
        self._store = serve_store(address)  # rank 0's is used
        return place, (address, self._store.port)

    def build(
        self,
        rank: int,
        world_size: int,
        address: tuple[str, int],
        worker_cls: Callable[..., Any],
        make: dict[str, Any],
        monitor: Any,
    ) -> None:
        """Make the worker; `monitor` gets its heartbeats."""
        names = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": address[0], "MASTER_PORT": address[1]}
        names["TORCHELASTIC_USE_AGENT_STORE"] = True  # rank 0 joins the store that is there, as under torchrun
        if rank:
            del self._store
        if address[0] == LOOPBACK and (interface := loopback_interface()) is not None:
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)
        # An actor sees only the GPUs that Ray has reserved for it: it uses the first.
        os.environ.update({name: str(value) for name, value in names.items()} | {"LOCAL_RANK": "0"})
        self._during = nullcontext if monitor is None else partial(beating, partial(monitor.note.remote, rank))
        with self._during("build"):
            self.worker = _worker_call(worker_cls, (), make)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with self._during(method):
            return _worker_call(getattr(self.worker, method), args, kwargs)


def _worker_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call `function`. `liveness._lines` finds the beginning of a call by the name of this frame."""
    return function(*args, **kwargs)


def import_ray() -> Any:
    """Return the module `ray`; raise an ImportError with the fix if it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise ImportError("RayPolicy needs Ray, which is not installed: pip install 'megatron-ext[ray]'") from error
    return ray


def _death(error: BaseException) -> str:
    """Return Ray's reason of an actor's death, without Ray's names for the actor, which come before it."""
    told = [line for line in str(error).splitlines() if not line.startswith(_RAY_NAMES)]
    return " ".join(" ".join(told).split())


def _own(error: Any) -> Exception:
    """Return the error that the rank raised, out of the one in which Ray sent it."""
    return error.cause if isinstance(error.cause, Exception) else error


def _told(errors: Mapping[int, Exception]) -> str:
    raised = {rank: _own(error) for rank, error in errors.items()}
    return "".join(f"; rank {rank} raised {type(own).__name__}: {own}" for rank, own in raised.items())

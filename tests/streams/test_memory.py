"""Nothing that one stream uses is overwritten or freed by another: first of the checker, then of the package's code."""

from functools import partial

import pytest
import torch

from megatron_ext.distributed import collectives
from megatron_ext.experimental.pipeline_vocabulary.side_stream import SideWork
from tests.streams.memory import MemoryLog
from tests.streams.recording import recording
from tests.streams.stage_recording import one_of_a_world, recorded_stages


@pytest.fixture
def log():
    log = MemoryLog()
    with one_of_a_world(0, 2), recording(log):
        yield log


def test_reading_without_waiting(log):
    x = torch.ones(4)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x + 1
    assert len(log.faults) == 1
    assert "reads on stream 1 what" in log.faults[0]
    assert "writes on stream 0" in log.faults[0]
    assert log.faults[0].count("tests/streams/test_memory.py") == 2
    log.faults.clear()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    y.record_stream(torch.cuda.current_stream())
    torch.cuda.current_stream().wait_stream(side)
    y * 2
    assert not log.faults


def test_writing_while_another_stream_reads(log):
    x, side = torch.ones(4), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()
    x.add_(1)
    assert [fault for fault in log.faults if "reads on stream 1, and does not wait" in fault]


@pytest.mark.parametrize("kept", [True, False])
def test_memory_that_is_freed_while_another_stream_reads(log, kept):
    side = torch.cuda.Stream()
    x = torch.ones(4)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()
    if kept:
        x.record_stream(side)
    del x
    assert bool(log.faults) != kept
    assert kept or "record_stream" in log.faults[0]


def exchanged_on_the_passes_stream(side: torch.cuda.Stream, launched_aside: bool) -> None:
    """Gather statistics launched on the passes' stream, as the head once did, or aside; read them aside and drop
    them."""
    statistics = torch.ones(1, 4)
    group = torch.distributed.group.WORLD
    ready = torch.cuda.current_stream().record_event()
    pending = None if launched_aside else collectives.start_all_gather(statistics, group)
    side.wait_event(ready)
    with torch.cuda.stream(side):
        gathered = (pending or collectives.start_all_gather(statistics, group)).wait()
        gathered.sum()
    statistics.record_stream(side)


def test_statistics_that_are_gathered_where_they_are_read(log):
    side = torch.cuda.Stream()
    exchanged_on_the_passes_stream(side, launched_aside=False)
    assert any("allocates on stream 0 what" in fault and "uses on stream 1" in fault for fault in log.faults)
    log.faults.clear()
    exchanged_on_the_passes_stream(side, launched_aside=True)
    assert not log.faults


def test_a_message_keeps_its_tensors_until_somebody_waits(log):
    pending = collectives.start_all_reduce(torch.ones(4), torch.distributed.group.WORLD)
    x = pending.wait()
    x + 1
    del x, pending
    assert not log.faults


@pytest.mark.parametrize("reads", [True, False])
def test_side_work_keeps_what_it_reads(log, reads):
    side = SideWork(torch.device("cpu"))
    x = torch.ones(4)
    aside = side.run(partial(torch.mul, x, 2), side.now(), [x] if reads else [])
    del x
    found = side.take(aside) + 1
    del aside
    side.close()
    assert found.sum() == 12
    assert bool(log.faults) != reads


@pytest.mark.parametrize(
    "sizes,settings",
    [
        pytest.param((2, 1, 3), {"mtp_num_layers": 1}, id="mtp"),
        pytest.param((2, 2, 4), {}, id="interleaved", marks=pytest.mark.slow),
        pytest.param((2, 1, 3), {"forward_only": True}, id="forward-only"),
    ],
)
def test_stages_that_share_the_vocabulary(sizes, settings):
    for log in recorded_stages(sizes, MemoryLog, **settings):
        assert not log.faults, "\n".join(sorted(set(log.faults)))
        assert {one.stream for one in log.submissions} >= {0, 1}

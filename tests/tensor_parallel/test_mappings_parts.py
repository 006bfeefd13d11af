"""The autograd functions behind the mappings, called part by part with a context of the caller's own."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings as stock

from megatron_ext.tensor_parallel import mappings
from tests.gpt import grouped
from tests.tensor_parallel.test_mappings import draw

CLASSES = {  # shapes of what `forward` and `backward` take
    "_CopyToModelParallelRegion": ((4, 6), (4, 6)),
    "_ReduceFromModelParallelRegion": ((4, 6), (4, 6)),
    "_ScatterToModelParallelRegion": ((4, 6), (4, 3)),
    "_GatherFromModelParallelRegion": ((4, 3), (4, 6)),
    "_ScatterToSequenceParallelRegion": ((4, 6), (2, 6)),
    "_GatherFromSequenceParallelRegion": ((2, 6), (4, 6)),
    "_ReduceScatterToSequenceParallelRegion": ((4, 6), (2, 6)),
    "_AllGatherFromTensorParallelRegion": ((4, 3), (4, 6)),
    "_ReduceScatterToTensorParallelRegion": ((4, 6), (4, 3)),
    "_AllToAll": ((4, 6), (4, 6)),
}


@grouped(2)
def test_the_parts_by_themselves_as_megatrons():
    """As Megatron's own tests call them. Clones, since it reduces its arguments in place."""
    for name, shapes in CLASSES.items():
        theirs, ours = (list(parts(getattr(module, name), shapes)) for module in (stock, mappings))
        assert [type(part) for part in theirs] == [type(part) for part in ours], name
        for a, b in zip(theirs, ours, strict=True):
            assert a is None or torch.equal(a, b), name


def parts(function, shapes):
    """What `symbolic`, `forward` and `backward` give, the last for either kind of context."""
    group = dist.group.WORLD
    (x,), (g,) = ([t + dist.get_rank() for t in draw([shape], 4)] for shape in shapes)
    options = {"group": group, "output_split_sizes": None, "input_split_sizes": None, "use_global_buffer": False}
    contexts = [SimpleNamespace(tensor_parallel_output_grad=t, **options) for t in (True, False)]
    written = SimpleNamespace()
    if function.__name__ == "_AllToAll":
        yield function.forward(written, group, x, None, None)
    else:
        yield function.symbolic(None, x.clone(), group)
        yield function.forward(written, x.clone(), group)
    assert vars(written).keys() <= vars(contexts[0]).keys()
    for context in contexts:
        gradients = list(function.backward(context, g.clone()))
        while gradients and gradients[-1] is None:  # of arguments that only one side has
            gradients.pop()
        yield from gradients

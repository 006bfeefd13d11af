"""The autograd functions behind the mappings, called part by part with a context of the caller's own."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_ext.tensor_parallel import mappings
from tests.gpt import model_parallel
from tests.ranks import ranks
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


@ranks(2)
@pytest.mark.parametrize("name", CLASSES)
def test_the_parts_by_themselves_as_megatrons(name):
    """As Megatron's own tests call them. Clones, since it reduces its arguments in place."""
    with model_parallel(tp=2):
        from megatron.core.tensor_parallel import mappings as stock

        group, results = dist.group.WORLD, []
        for module in (stock, mappings):
            (x,), (g,) = ([t + dist.get_rank() for t in draw([shape], 4)] for shape in CLASSES[name])
            function, written = getattr(module, name), SimpleNamespace()
            options = {"output_split_sizes": None, "input_split_sizes": None, "use_global_buffer": False}
            given = [SimpleNamespace(group=group, tensor_parallel_output_grad=t, **options) for t in (True, False)]
            if name == "_AllToAll":
                made = [function.forward(written, group, x, None, None)]
            else:
                made = [function.symbolic(None, x.clone(), group), function.forward(written, x.clone(), group)]
            gradients = [function.backward(context, g.clone()) for context in given]
            results.append([*made, *(part for found in gradients for part in found)])
            for option in vars(written):
                assert option in vars(given[0])
        assert [type(part) for part in results[0]] == [type(part) for part in results[1]]
        for theirs, ours in zip(*results, strict=True):
            assert theirs is None or torch.equal(theirs, ours)

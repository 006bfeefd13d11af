"""Every mapping, forward and backward, against the same arithmetic on all ranks' tensors in one process."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import mappings as stock

from megatron_ext.distributed.counting import count_collectives
from megatron_ext.tensor_parallel import mappings
from tests.fuzz.mappings import MAPPINGS, UNEVEN, cut
from tests.gpt import grouped
from tests.ranks import ranks

ROWS = [3, 0, 5, 1]  # rows of each rank where they differ
SENT = {  # forward and backward
    "copy": ("", "allreduce"),
    "reduce": ("allreduce", ""),
    "scatter last": ("", "allgather_base"),
    "gather last": ("allgather_base", ""),
    "scatter first": ("", "allgather_base"),
    "gather first": ("allgather_base", "reduce_scatter_base"),
    "gather first, repeated": ("allgather_base", ""),
    "reduce-scatter first": ("reduce_scatter_base", "allgather_base"),
    "all-gather last": ("allgather_base", "reduce_scatter_base"),
    "reduce-scatter last": ("reduce_scatter_base", "allgather_base"),
    "sp2hp": ("alltoall_base", "alltoall_base"),
    "hp2sp": ("alltoall_base", "alltoall_base"),
}
CASES = [(name, False) for name in SENT] + [(name, True) for name in UNEVEN]
by_case = pytest.mark.parametrize("name, uneven", CASES, ids=[name + ", uneven" * uneven for name, uneven in CASES])


class Problem:
    """A mapping, and what all ranks hold before and after it, by `tests.fuzz.mappings`."""

    def __init__(self, name, uneven):
        ranks = dist.get_world_size()
        self._function, before, self._made, after = MAPPINGS[name]
        rows = ROWS[:ranks] if uneven else None
        self.shape = [sum(rows) if uneven else 2 * ranks, 4 * ranks]
        if "2" not in name:
            self.shape.insert(1, 3)
        if before == "each":
            self.shape.insert(0, ranks)
        self.own, self.own_result = (partial(cut(held, ranks, rows), rank=dist.get_rank()) for held in (before, after))
        sizes = rows if name == "gather first" else torch.tensor(rows or [])
        self._options = {UNEVEN[name]: sizes} if uneven else {}

    def run(self, x):
        return self._function(x, group=dist.group.WORLD, **self._options)

    def truth(self, x):
        return self._made(x, dist.get_world_size())


def draw(shapes, seed, dtype=torch.float32):
    """One tensor per shape, small integers so that sums are exact; every rank draws all of them alike."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(-9, 9, shape, generator=g).to(dtype) for shape in shapes]


def sent(counts):
    return ",".join(sorted(counts.elements()))


@ranks(1, 2, 4)
@pytest.mark.parametrize(
    "dtype, layout", [(torch.float32, "contiguous"), (torch.bfloat16, "strided")], ids=["fp32", "bf16-strided"]
)
@by_case
def test_values_and_gradients(name, uneven, dtype, layout):
    problem, (forward, backward) = Problem(name, uneven), SENT[name] if dist.get_world_size() > 1 else ("", "")
    (whole,) = draw([problem.shape], seed=1, dtype=dtype)
    whole.requires_grad_()
    wanted = problem.truth(whole)
    (whole_g,) = draw([wanted.shape], seed=2, dtype=dtype)
    expected = problem.own(torch.autograd.grad(wanted, whole, whole_g)[0])
    x, g = problem.own(whole.detach()), problem.own_result(whole_g)
    if layout == "strided":  # same values, other strides: transposed memory, which no collective can send as it lies
        x, g = (t.movedim(0, -1).contiguous().movedim(-1, 0) for t in (x, g))
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()

    with count_collectives() as counts:
        y = problem.run(x)
    assert sent(counts) == forward
    assert y.dtype == dtype
    assert torch.equal(y, problem.own_result(wanted))
    assert name == "copy" or y.is_contiguous()

    upstream = g.clone(memory_format=torch.preserve_format)
    with count_collectives() as counts:
        (dx,) = torch.autograd.grad(y, x, upstream, retain_graph=True)
    assert sent(counts) == backward
    assert dx.dtype == dtype
    assert torch.equal(dx, expected)

    (again,) = torch.autograd.grad(y, x, upstream)
    assert torch.equal(again, expected), "backward is repeatable"
    assert torch.equal(x, problem.own(whole)), "the input was written"
    assert torch.equal(upstream, g), "the gradient was written"


@ranks(2, 4)
@by_case
def test_the_gradient_of_the_gradient_is_the_mapping_again(name, uneven):
    problem = Problem(name, uneven)
    whole, other = draw([problem.shape] * 2, seed=1)
    assert not problem.run(problem.own(whole)).requires_grad, "the input decides whether a gradient is sent"
    x = problem.own(whole).clone().requires_grad_()
    y = problem.run(x)
    upstream = torch.ones_like(y, requires_grad=True)
    (dx,) = torch.autograd.grad(y, x, upstream, create_graph=True)
    (again,) = torch.autograd.grad(dx, upstream, problem.own(other))
    assert torch.equal(again, problem.own_result(problem.truth(other)))


@ranks(2)
def test_expanded_gradients():
    """The gradient of a sum is one number seen many times: it has no memory of its own to send."""
    x = torch.ones(4, 4, requires_grad=True)
    mappings.copy_to_tensor_model_parallel_region(x, dist.group.WORLD).sum().backward()
    assert torch.equal(x.grad, torch.full((4, 4), 2.0))
    y = torch.ones(4, 4, requires_grad=True)
    mappings.gather_from_sequence_parallel_region(y, group=dist.group.WORLD).sum().backward()
    assert torch.equal(y.grad, torch.full((4, 4), 2.0))


@ranks(2)
def test_reduce_leaves_what_the_graph_still_needs():
    """The reduced tensor's own graph saved it: overwritten, its gradient would be taken at another place."""
    weight = torch.full((3,), float(dist.get_rank() + 1), requires_grad=True)
    exp = weight.exp()
    mappings.reduce_from_tensor_model_parallel_region(exp, dist.group.WORLD).sum().backward()
    assert torch.equal(exp, weight.exp())
    assert torch.equal(weight.grad, weight.exp())


@ranks(2)
def test_results_share_no_buffer():
    rank = dist.get_rank()
    first, second = (
        mappings.gather_from_sequence_parallel_region(
            torch.full((2, 2), float(n + rank)), group=dist.group.WORLD, use_global_buffer=True
        )
        for n in (0, 10)
    )
    assert first[:, 0].tolist() == [0, 0, 1, 1]
    assert second[:, 0].tolist() == [10, 10, 11, 11]


@ranks(1, 2, 4)
@pytest.mark.parametrize("make", [None, list, torch.tensor], ids=["equal", "list", "tensor"])
def test_all_to_all_sends_once(make):
    """Each rank sends rank i as many rows as it gets from it; other numbers, and gradients: `tests.fuzz.mappings`."""
    size, rank = dist.get_world_size(), dist.get_rank()
    rows = [ROWS[(i + rank) % size] if make else 2 for i in range(size)]
    sizes = (make(rows), make(rows)) if make else ()
    x = torch.full((sum(rows), 3), float(rank), requires_grad=True)
    with count_collectives() as counts:
        y = mappings.all_to_all(dist.group.WORLD, x, *sizes)
        y.backward(y.detach())
    assert y[:, 0].tolist() == [i for i in range(size) for _ in range(rows[i])]
    assert torch.equal(x.grad, x)
    assert sent(counts) == ("alltoall_base,alltoall_base" if size > 1 else "")


@ranks(1, 2, 4)
def test_leading_dims_are_tokens_too():
    group, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    (whole_NH,) = draw([(6 * size, 4 * size)], seed=1)
    x = whole_NH.chunk(size)[rank].reshape(2, 3, -1).requires_grad_()
    y = mappings.all_to_all_sp2hp(x, group)
    assert torch.equal(y, whole_NH.chunk(size, dim=1)[rank])
    assert torch.equal(torch.autograd.grad(y, x, y)[0], x)


def test_alone_without_a_group():
    x = torch.randn(3, 5, requires_grad=True)
    for name in SENT:
        assert torch.equal(MAPPINGS[name][0](x, group=None), x)


@ranks(2)
@pytest.mark.parametrize("name", SENT)
def test_several_ranks_need_a_group(name):
    with pytest.raises(ValueError, match="group is None and Megatron's parallel_state is not initialised"):
        MAPPINGS[name][0](torch.ones(4, 4), group=None)


@ranks(2)
def test_what_does_not_fit_is_refused():
    group = dist.group.WORLD
    x = torch.ones(3, 5)
    for mapping, dim, length in (
        (mappings.scatter_to_tensor_model_parallel_region, "last", 5),
        (mappings.reduce_scatter_last_dim_to_tensor_parallel_region, "last", 5),
        (mappings.all_to_all_sp2hp, "last", 5),
        (mappings.scatter_to_sequence_parallel_region, "first", 3),
        (mappings.reduce_scatter_to_sequence_parallel_region, "first", 3),
        (mappings.all_to_all_hp2sp, "first", 3),
        (lambda x, group: mappings.all_to_all(group, x), "first", 3),
    ):
        said = rf"shape \(3, 5\): the length {length} of its {dim} dim must divide.*pad it to {length + 1}"
        with pytest.raises(ValueError, match=said):
            mapping(x, group)
    for name in SENT.keys() - {"copy", "reduce"}:
        with pytest.raises(ValueError, match="input_ is a scalar"):
            MAPPINGS[name][0](torch.tensor(1.0), group=group)
    with pytest.raises(
        ValueError, match=r"output_split_sizes is \[3\]: it must hold one length >= 0 for each of the 2"
    ):
        mappings.gather_from_sequence_parallel_region(x, group=group, output_split_sizes=[3])
    with pytest.raises(ValueError, match=r"output_split_sizes is \[2, 2\], which gives this rank .* its input_ has 3"):
        mappings.gather_from_sequence_parallel_region(x, group=group, output_split_sizes=[2, 2])
    for sizes in ([2, 2], [2, 3]):  # no rows are that many, nor are columns meant
        with pytest.raises(ValueError, match=f"which adds up to {sum(sizes)}.* 3 rows"):
            mappings.reduce_scatter_to_sequence_parallel_region(x, group, sizes)
    with pytest.raises(ValueError, match=r"input_split_sizes is \[5, -2\]: it must hold one length >= 0"):
        mappings.all_to_all(group, x, [1, 2], [5, -2])
    with pytest.raises(ValueError, match="group is None: an all-to-all needs to be told its ranks"):
        mappings.all_to_all(None, x)
    alone = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="group does not hold this rank"):
            mappings.reduce_from_tensor_model_parallel_region(x, alone)


@pytest.mark.slow
@ranks(2)
def test_compiles_without_graph_breaks():
    group, rank = dist.group.WORLD, dist.get_rank()

    def chain(x):
        x = mappings.copy_to_tensor_model_parallel_region(x, group)
        x = mappings.scatter_to_tensor_model_parallel_region(x, group) * (rank + 1)
        x = mappings.gather_from_tensor_model_parallel_region(x, group)
        x = mappings.reduce_scatter_to_sequence_parallel_region(x, group)
        return mappings.gather_from_sequence_parallel_region(x, group=group)

    x, g = draw([(4, 6)] * 2, seed=1)
    results = []
    for run in (chain, torch.compile(chain, fullgraph=True, backend="aot_eager")):
        own_x = x.clone().requires_grad_()
        y = run(own_x)
        y.backward(g)
        results.append((y.detach(), own_x.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


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
    """Megatron's own tests call these parts; they get clones, since Megatron's reduces its arguments in place."""
    for name, shapes in CLASSES.items():
        theirs, ours = (list(parts(getattr(module, name), shapes)) for module in (stock, mappings))
        assert [type(part) for part in theirs] == [type(part) for part in ours], name
        for a, b in zip(theirs, ours, strict=True):
            assert a is None or torch.equal(a, b), name


def parts(function, shapes):
    """Yield what `symbolic`, `forward` and `backward` give, the last for either kind of context."""
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

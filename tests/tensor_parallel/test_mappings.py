"""Every mapping, forward and backward, against the same arithmetic on all ranks' tensors in one process."""

import pytest
import torch
import torch.distributed as dist

from megatron_ext.distributed.counting import count_collectives
from megatron_ext.tensor_parallel import mappings
from tests.ranks import ranks

ROWS = [3, 0, 5, 1]  # rows of each rank where they differ


# What one rank's result is, from all ranks' tensors.
def own(xs, rank):
    return xs[rank]


def total(xs, rank):
    return torch.stack(xs).sum(0)


def joined(dim):
    return lambda xs, rank: torch.cat(xs, dim)


def split(x, ranks, dim, rows=None):
    return x.chunk(ranks, dim) if rows is None else x.split(rows[:ranks], dim)


def piece(dim, rows=None):
    return lambda xs, rank: split(xs[rank], len(xs), dim, rows)[rank]


def piece_of_total(dim, rows=None):
    return lambda xs, rank: split(total(xs, rank), len(xs), dim, rows)[rank]


def even(rank, size):
    return 2 * size, 3, 4 * size


def own_rows(rank, size):
    return ROWS[rank], 3


def all_rows(rank, size):
    return sum(ROWS[:size]), 3


def gather_first(*args, rows=None, **kwargs):
    """`rows`: makes the split sizes of however many ranks there are."""
    return lambda x, group: mappings.gather_from_sequence_parallel_region(
        x, *args, group=group, output_split_sizes=rows and rows(ROWS[: dist.get_world_size()]), **kwargs
    )


def reduce_scatter_first(rows=None, **kwargs):
    return lambda x, group: mappings.reduce_scatter_to_sequence_parallel_region(
        x, group=group, input_split_sizes=rows and rows(ROWS[: dist.get_world_size()]), **kwargs
    )


# name: mapping, shape of its input, result, gradient from the results' gradients, what is sent forward and backward
MAPPINGS = {
    "copy": (mappings.copy_to_tensor_model_parallel_region, even, own, total, "", "allreduce"),
    "reduce": (mappings.reduce_from_tensor_model_parallel_region, even, total, own, "allreduce", ""),
    "scatter last": (
        mappings.scatter_to_tensor_model_parallel_region, even, piece(-1), joined(-1), "", "allgather_base",
    ),
    "gather last": (
        mappings.gather_from_tensor_model_parallel_region, even, joined(-1), piece(-1), "allgather_base", "",
    ),
    "scatter first": (mappings.scatter_to_sequence_parallel_region, even, piece(0), joined(0), "", "allgather_base"),
    "gather first": (gather_first(), even, joined(0), piece_of_total(0), "allgather_base", "reduce_scatter_base"),
    "gather first, repeated": (gather_first(False), even, joined(0), piece(0), "allgather_base", ""),
    "gather first, uneven": (
        gather_first(rows=list), own_rows, joined(0), piece_of_total(0, ROWS), "allgather_base", "reduce_scatter_base",
    ),
    "gather first, uneven, repeated": (
        gather_first(False, rows=torch.tensor), own_rows, joined(0), piece(0, ROWS), "allgather_base", "",
    ),
    "reduce-scatter first": (
        reduce_scatter_first(), even, piece_of_total(0), joined(0), "reduce_scatter_base", "allgather_base",
    ),
    "reduce-scatter first, uneven": (
        reduce_scatter_first(rows=torch.tensor), all_rows, piece_of_total(0, ROWS), joined(0),
        "reduce_scatter_base", "allgather_base",
    ),
    "all-gather last": (
        mappings.all_gather_last_dim_from_tensor_parallel_region, even, joined(-1), piece_of_total(-1),
        "allgather_base", "reduce_scatter_base",
    ),
    "reduce-scatter last": (
        mappings.reduce_scatter_last_dim_to_tensor_parallel_region, even, piece_of_total(-1), joined(-1),
        "reduce_scatter_base", "allgather_base",
    ),
}  # fmt: skip


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
@pytest.mark.parametrize("name", MAPPINGS)
def test_values_and_gradients(name, dtype, layout):
    mapping, shape, result, gradient, forward, backward = MAPPINGS[name]
    group, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    xs = draw([shape(r, size) for r in range(size)], seed=1, dtype=dtype)
    ys = [result(xs, r) for r in range(size)]
    gs = draw([y.shape for y in ys], seed=2, dtype=dtype)
    x, g = xs[rank], gs[rank]
    if layout == "strided":  # same values, other strides: transposed memory, which no collective can send as it lies
        x, g = (t.movedim(0, -1).contiguous().movedim(-1, 0) for t in (x, g))
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()

    with count_collectives() as counts:
        y = mapping(x, group)
    assert sent(counts) == (forward if size > 1 else "")
    assert y.dtype == dtype
    assert torch.equal(y, ys[rank])
    assert name == "copy" or y.is_contiguous()

    upstream = g.clone(memory_format=torch.preserve_format)
    with count_collectives() as counts:
        (dx,) = torch.autograd.grad(y, x, upstream, retain_graph=True)
    assert sent(counts) == (backward if size > 1 else "")
    expected = gradient(gs, rank)
    assert dx.dtype == dtype
    assert torch.equal(dx, expected)

    (again,) = torch.autograd.grad(y, x, upstream)
    assert torch.equal(again, expected), "backward is repeatable"
    assert torch.equal(x, xs[rank]), "the input was written"
    assert torch.equal(upstream, g), "the gradient was written"


@ranks(2, 4)
@pytest.mark.parametrize("name", MAPPINGS)
def test_the_gradient_of_the_gradient_is_the_mapping_again(name):
    mapping, shape, result, _, _, _ = MAPPINGS[name]
    size, rank = dist.get_world_size(), dist.get_rank()
    xs = draw([shape(r, size) for r in range(size)], seed=1)
    x = xs[rank].requires_grad_()
    y = mapping(x, dist.group.WORLD)
    upstream = torch.ones_like(y, requires_grad=True)
    (dx,) = torch.autograd.grad(y, x, upstream, create_graph=True)
    zs = draw([shape(r, size) for r in range(size)], seed=3)
    (again,) = torch.autograd.grad(dx, upstream, zs[rank])
    assert torch.equal(again, result(zs, rank))


@ranks(2, 4)
@pytest.mark.parametrize("name", MAPPINGS)
def test_the_input_decides_whether_a_gradient_is_sent(name):
    mapping, shape, *_ = MAPPINGS[name]
    (x,) = draw([shape(dist.get_rank(), dist.get_world_size())], seed=1)
    assert not mapping(x, dist.group.WORLD).requires_grad


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
@pytest.mark.parametrize("sizes", ["none", "list", "tensor"])
def test_all_to_all(sizes):
    group, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    # rows that rank i sends to rank j
    rows = (
        [[2 for _ in range(size)] for _ in range(size)]
        if sizes == "none"
        else [ROWS[i:size] + ROWS[:i] for i in range(size)]
    )
    sends = rows[rank]
    receives = [rows[i][rank] for i in range(size)]
    xs = draw([(sum(rows[i]), 3) for i in range(size)], seed=1)
    ys = [torch.cat([xs[i].split(rows[i])[j] for i in range(size)]) for j in range(size)]
    gs = draw([y.shape for y in ys], seed=2)
    dx = torch.cat([gs[j].split([rows[i][j] for i in range(size)])[rank] for j in range(size)])

    x = xs[rank].t().contiguous().t().requires_grad_()
    make = {"none": lambda _: None, "list": list, "tensor": torch.tensor}[sizes]
    with count_collectives() as counts:
        y = mappings.all_to_all(group, x, make(receives), make(sends))
    assert sent(counts) == ("alltoall_base" if size > 1 else "")
    assert torch.equal(y, ys[rank])
    with count_collectives() as counts:
        y.backward(gs[rank])
    assert sent(counts) == ("alltoall_base" if size > 1 else "")
    assert torch.equal(x.grad, dx)


@ranks(1, 2, 4)
def test_tokens_or_hidden_units_split():
    group, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    (whole_NH, upstream_NH) = draw([(6 * size, 4 * size)] * 2, seed=1)
    by_tokens, by_hidden = whole_NH.chunk(size)[rank], whole_NH.chunk(size, dim=1)[rank]
    x = by_tokens.reshape(2, 3, -1).clone().requires_grad_()  # leading dims are tokens too
    with count_collectives() as counts:
        y = mappings.all_to_all_sp2hp(x, group)
        y.backward(upstream_NH.chunk(size, dim=1)[rank])
    assert counts["alltoall_base"] == sum(counts.values()) == (2 if size > 1 else 0)
    assert torch.equal(y, by_hidden)
    assert torch.equal(x.grad, upstream_NH.chunk(size)[rank].view_as(x))

    x = by_hidden.clone().requires_grad_()
    with count_collectives() as counts:
        y = mappings.all_to_all_hp2sp(x, group)
        y.backward(upstream_NH.chunk(size)[rank])
    assert counts["alltoall_base"] == sum(counts.values()) == (2 if size > 1 else 0)
    assert torch.equal(y, by_tokens)
    assert torch.equal(x.grad, upstream_NH.chunk(size, dim=1)[rank])


def test_alone_without_a_group():
    """A process that stands alone needs no torch.distributed."""
    x = torch.randn(3, 5, requires_grad=True)
    for name, (mapping, *_) in MAPPINGS.items():
        if "uneven" not in name:
            assert torch.equal(mapping(x, None), x)
    assert torch.equal(mappings.all_to_all_sp2hp(x), x)
    assert torch.equal(mappings.all_to_all_hp2sp(x), x)


@ranks(2)
@pytest.mark.parametrize("name", MAPPINGS)
def test_several_ranks_need_a_group(name):
    mapping, shape, *_ = MAPPINGS[name]
    (x,) = draw([shape(dist.get_rank(), 2)], seed=1)
    with pytest.raises(ValueError, match="group is None and Megatron's parallel_state is not initialised"):
        mapping(x, None)


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
        with pytest.raises(
            ValueError,
            match=f"shape \\(3, 5\\): the length {length} of its {dim} dim must divide.*pad it to {length + 1}",
        ):
            mapping(x, group)
    for mapping, *_ in MAPPINGS.values():
        if mapping not in (
            mappings.copy_to_tensor_model_parallel_region,
            mappings.reduce_from_tensor_model_parallel_region,
        ):
            with pytest.raises(ValueError, match="input_ is a scalar"):
                mapping(torch.tensor(1.0), group)
    with pytest.raises(
        ValueError, match=r"output_split_sizes is \[3\]: it must hold one length >= 0 for each of the 2"
    ):
        mappings.gather_from_sequence_parallel_region(x, group=group, output_split_sizes=[3])
    with pytest.raises(ValueError, match=r"output_split_sizes is \[2, 2\], which gives this rank .* its input_ has 3"):
        mappings.gather_from_sequence_parallel_region(x, group=group, output_split_sizes=[2, 2])
    with pytest.raises(ValueError, match=r"input_split_sizes is \[2, 2\], which adds up to 4.* 3 rows"):
        mappings.reduce_scatter_to_sequence_parallel_region(x, group, [2, 2])
    with pytest.raises(ValueError, match=r"input_split_sizes is \[5, -2\]: it must hold one length >= 0"):
        mappings.all_to_all(group, x, [1, 2], [5, -2])
    with pytest.raises(ValueError, match="group is None: an all-to-all needs to be told its ranks"):
        mappings.all_to_all(None, x)
    alone = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="group does not hold this rank"):
            mappings.reduce_from_tensor_model_parallel_region(x, alone)


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

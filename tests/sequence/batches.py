"""Batches that context-parallel ranks share, a model that learns from them, and what a query may see."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

SENTINEL = -1000


def cp_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def packed_batch(rows, sentinel=SENTINEL):
    """Pack rows of documents (tokens, places); tokens from 1 up, 0 on padding, labels 1000 higher."""
    most = max(len(row) for row in rows)
    batch = {name: [] for name in ("input_ids", "seq_lens", "seq_lens_padded")}
    token = 1
    for row in rows:
        ids = []
        for n, places in row:
            ids += [*range(token, token + n)] + [0] * (places - n)
            token += n
        filler = [sentinel] * (most - len(row))
        batch["input_ids"].append(ids)
        batch["seq_lens"].append([n for n, _ in row] + filler)
        batch["seq_lens_padded"].append([places for _, places in row] + filler)
    tensors = {name: torch.tensor(x) for name, x in batch.items()}
    return tensors | {"labels": tensors["input_ids"] + 1000}


def expected_line(rows, size, rank):
    """Ids, labels, positions and padding of `rank`, by a loop over its two chunks of each document."""
    ids, positions, padding, token = [], [], [], 1
    for n, places in [document for row in rows for document in row]:
        chunk = places // (2 * size)
        for c in (rank, 2 * size - 1 - rank):
            for position in range(c * chunk, (c + 1) * chunk):
                ids.append(token + position if position < n else 0)
                positions.append(position)
                padding.append(position >= n)
        token += n
    ids = torch.tensor(ids, dtype=torch.int64)
    return ids, ids + 1000, torch.tensor(positions, dtype=torch.int64), torch.tensor(padding, dtype=torch.bool)


class TinyLM(torch.nn.Module):
    """A language model of one attention layer that knows nothing of ranks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.tokens, self.places = torch.nn.Embedding(11, 8), torch.nn.Embedding(64, 8)
        self.qkv, self.head = torch.nn.Linear(8, 24), torch.nn.Linear(8, 11)
        self.double()

    def forward(self, input_ids, position_ids, attention=None):
        x = self.tokens(input_ids) + self.places(position_ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).movedim(-3, 0)  # [B, S, H, D] each
        if attention is None:
            out = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=True)
            out = out.transpose(1, 2)
        else:
            out = attention(q, k, v)
        return self.head(x + out.flatten(-2))


def losses(logits, labels):
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")


def check_sum_over_ranks(model, loss, expected_loss, expected):
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, expected_loss.detach())
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, grad)


def seen(window, queries, keys):
    """bool [queries, keys], written out; the ends are aligned."""
    rows = []
    for i in range(keys - queries, keys):
        low = 0 if window.left is None else i - window.left
        high = keys if window.right is None else i + window.right
        rows.append([low <= j <= high for j in range(keys)])
    return torch.tensor(rows, dtype=torch.bool).view(queries, keys)


def documents_seen(window, q_packing, kv_packing):
    """bool [queries, keys] of a pack: blocks on the diagonal, nothing for the places of the padding."""
    visible = torch.zeros(sum(q_packing.places), sum(kv_packing.places), dtype=torch.bool)
    row = column = 0
    for n, rows, m, columns in zip(
        q_packing.lengths, q_packing.places, kv_packing.lengths, kv_packing.places, strict=True
    ):
        visible[row : row + n, column : column + m] = seen(window, n, m)
        row, column = row + rows, column + columns
    return visible

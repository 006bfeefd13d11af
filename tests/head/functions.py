"""The functions of the head that read labels, ids or the largest logits, called alike: with labels and any options."""

from megatron_ext import head

# Of hidden states, weight and labels.
OF_HIDDEN = {
    "cross entropy": head.linear_cross_entropy,
    "log-probs": head.linear_log_probs,
    "gathered": lambda x, w, labels, **of: head.linear_gather_log_probs(x, w, labels.unsqueeze(-1), **of),
    "largest": lambda x, w, labels, **of: head.linear_topk_log_probs(x, w, 3, **of)[0],
    "top-k": lambda x, w, labels, **of: head.linear_sampled_log_probs(x, w, labels, 8, **of),
    "top-p": lambda x, w, labels, **of: head.linear_sampled_log_probs(x, w, labels, None, 0.999999, **of),
}
# Of logits and labels.
OF_LOGITS = {
    "cross entropy": head.vocab_parallel_cross_entropy,
    "log-probs": head.token_log_probs,
    "gathered": lambda z, labels, **of: head.gather_log_probs(z, labels.unsqueeze(-1), **of),
    "logits": lambda z, labels, **of: head.gather_logits(z, labels.unsqueeze(-1), **of),
    "largest": lambda z, labels, **of: head.vocab_topk(z, 3, **of)[0],
    "top-k": lambda z, labels, **of: head.sampled_log_probs(z, labels, 8, **of),
    "top-p": lambda z, labels, **of: head.sampled_log_probs(z, labels, None, 0.999999, **of),
}
# Of hidden states, weight and labels: the logits are made before.
OF_MADE_LOGITS = {
    f"{name} of logits": lambda x, w, labels, call=call, **of: call(x @ w.t(), labels, **of)
    for name, call in OF_LOGITS.items()
}


def of_labels(*tables):
    """The functions in these tables that look at labels, and by what name they complain of them."""
    return {
        name: (call, "indices" if name.startswith(("gathered", "logits")) else "labels")
        for table in tables
        for name, call in table.items()
        if not name.startswith("largest")
    }

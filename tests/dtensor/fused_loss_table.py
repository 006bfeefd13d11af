"""Writes the table of docs/fused_loss_table.md: each causal model of the installed transformers under `use_fused_loss`.

Each is built tiny, and its loss and gradients are compared with those of the same model without it.

    python -m tests.dtensor.fused_loss_table [CLASSES...]
"""

import argparse
import contextlib
import copy
import multiprocessing
import re
import sys
import warnings
from pathlib import Path

import torch
import transformers
from transformers.models.auto import modeling_auto

from megatron_ext.dtensor import use_fused_loss
from megatron_ext.dtensor.output.fused_loss import proof_of

PAGE = Path(__file__).parents[2] / "docs" / "fused_loss_table.md"
BEGIN, END = "<!-- table -->", "<!-- end of the table -->"
TIME_S = 40
VOCAB = 97

# By the last word of an attribute of a config, what makes it small; an attribute that is 0 or None stays so.
SMALL = {
    r"vocab_size(_per_layer_input)?$": VOCAB,
    r"(hidden_size|d_model|n_embd|embed_dim|word_embed_proj_dim|model_dim|dim_model)$": 32,
    r"(n_embed|embedding_size|lru_width)$": 32,
    r"(intermediate_size(_mlp)?|ffn_dim|d_ff|inner_dim|d_inner|dim_ff|n_inner|ffn_hidden_size|hidden_dim)$": 48,
    r"(moe_intermediate_size|shared_expert_intermediate_size|expert_ffn_hidden_size|shared_intermediate_size)$": 24,
    r"(num_hidden_layers|n_layers?|num_layers|decoder_layers|encoder_layers|num_decoder_layers)$": 2,
    r"(num_attention_heads|n_heads?|num_heads|decoder_attention_heads|encoder_attention_heads)$": 4,
    r"(num_key_value_heads|num_kv_heads|multi_query_group_num)$": 2,
    r"(head_dim|attention_head_dim|kv_channels|qk_rope_head_dim|qk_nope_head_dim|v_head_dim|qk_head_dim)$": 8,
    r"(global_head_dim|swa_head_dim|hidden_size_per_layer_input|rotary_dim)$": 8,
    r"(q_lora_rank|kv_lora_rank|o_lora_rank)$": 16,
    r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts)$": 4,
    r"(num_experts_per_tok|num_experts_per_token|moe_k|top_k_experts|moe_topk|moe_top_k)$": 2,
    r"(max_position_embeddings|n_positions|max_seq_len|seq_length|n_ctx|max_sequence_length)$": 128,
    r"(sliding_window|attention_window|attention_chunk_size|attention_window_size)$": 8,
    r"(mamba_d_state|state_size|ssm_state_size|mamba_d_head|mamba_head_dim)$": 8,
}
ZERO = r"(dropout|drop|pdrop|dropout_rate|layerdrop|dropout_prob|dropout_p|router_jitter_noise)$"
NONE = ("pad_token_id",)


def shrink(config):
    """`config` with each size small, and each dropout 0."""
    before = {name: getattr(config, name, None) for name in vars(config)}
    for name, value in before.items():
        if isinstance(value, transformers.PreTrainedConfig):
            shrink(value)
        elif isinstance(value, bool):
            continue
        elif isinstance(value, float) and re.search(ZERO, name):
            _set(config, name, 0.0)
        elif isinstance(value, int) and value:
            small = next((small for pattern, small in SMALL.items() if re.search(pattern, name)), None)
            if small is not None:
                _set(config, name, small)
        elif isinstance(value, list) and name in ("layer_types", "mlp_layer_types", "layers_block_type"):
            kinds = list(dict.fromkeys(value))
            _set(config, name, (kinds * 2)[:2])
    for name in before:
        if name.endswith("token_id") and isinstance(before[name], int):
            _set(config, name, None if name in NONE else 1)
    return config


def _set(config, name, value):
    with contextlib.suppress(Exception):
        setattr(config, name, value)


def tiny(kind):
    """A tiny model of a class of transformers: first by sizes of a new config, else of its default one made small."""
    config_class = kind.config_class
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    own = {"MiniCPM3Config": {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 8}}
    sizes |= own.get(config_class.__name__, {})
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None, "max_position_embeddings": 128}
    faults = []
    for make in (lambda: shrink(config_class()), lambda: config_class(**sizes), lambda: shrink(config_class(**sizes))):
        try:
            torch.manual_seed(1)
            config = make()
            with torch.device("meta"):
                count = sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
            if count > 3_000_000:
                raise ValueError(f"{count / 1e6:.0f} million parameters")
            model = kind(config)
            model(**batch(model))
            return model.train()
        except Exception as fault:
            faults.append(f"{type(fault).__name__}: {str(fault).strip().splitlines()[0][:80] if str(fault) else ''}")
    raise ValueError(faults[0])


def batch(model):
    """Token ids and labels, some of which are no target."""
    rows = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(2, min(rows, VOCAB), (2, 24), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[0, :4] = labels[-1, 20:] = -100
    return {"input_ids": ids, "labels": labels}


def run(model):
    torch.manual_seed(7)
    loss = model(**batch(model)).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def entry(name):
    """What `use_fused_loss` makes of the class `name`."""
    kind = getattr(transformers, name)
    try:
        model = tiny(kind)
    except Exception as fault:
        return "not built small", str(fault)
    stock = copy.deepcopy(model)
    expected, true = run(stock)
    try:
        use_fused_loss(model)
    except ValueError as fault:
        return "refused", str(fault)
    loss, found = run(model)
    proof = proof_of(model)
    assert torch.isfinite(expected)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    assert found.keys() == true.keys()
    largest = max(x.norm().item() for x in true.values())
    for parameter, gradient in true.items():
        difference = (found[parameter] - gradient).norm().item()
        assert difference <= 1e-4 * max(gradient.norm().item(), 1e-3 * largest), (parameter, difference)
    if proof is not None and proof.fused:
        return "fused", str(proof)
    return "its own loss", proof.reason if proof is not None else "no proof was made"


def _in_process(name, queue):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    try:
        queue.put(entry(name))
    except BaseException as fault:
        said = str(fault).strip().splitlines()
        queue.put(("WRONG", f"{type(fault).__name__}: {' '.join(said[:3])[:200]}"))


def guarded(name):
    """`entry(name)` in a process of its own, which may not end."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_in_process, args=(name, queue), daemon=True)
    process.start()
    try:
        return queue.get(timeout=TIME_S)
    except Exception:
        return "not built small", f"took more than {TIME_S} s, or its process ended"
    finally:
        process.kill()
        process.join()


def names():
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    pictures = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    found = [each for name in (*causal, *pictures) for each in ((name,) if isinstance(name, str) else name)]
    return sorted({name for name in found if hasattr(transformers, name)})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("classes", nargs="*", help="only these, and only printed")
    chosen = parser.parse_args().classes
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    lines, counts = ["| class | loss | proof, or reason |", "|---|---|---|"], {}
    for name in chosen or names():
        kind, why = guarded(name)
        counts[kind] = counts.get(kind, 0) + 1
        lines.append(f"| {name} | {kind} | {why.replace('|', '/')} |")
        print(lines[-1], flush=True)
    total = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items(), key=lambda item: -item[1]))
    version = f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"
    text = "\n".join([f"With {version}: {total}.", "", *lines])
    print(total)
    if not chosen:
        before, after = PAGE.read_text().partition(BEGIN)[0], PAGE.read_text().partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
    return int("WRONG" in counts)


if __name__ == "__main__":
    sys.exit(main())

"""The proof of a fusion: a model's own loss and the fused loss of the same few tokens are compared.

Each way in that replaces a model's loss makes two functions of hidden states at the input of the model's own head, and
asks `Proofs.of(...)` whether they are equal: at the first call, and again after a change of the proof's basis. The
package imports only torch and `megatron_ext.distributed`.
"""

from megatron_ext.proof.comparison import compare
from megatron_ext.proof.proofs import (
    SAMPLE_TOKENS,
    Proof,
    ProofBasis,
    ProofMode,
    Proofs,
    agreed,
    cannot_prove_now,
    error_words,
    fusion_is_on,
    proof_mode,
    warn_of_changes,
    why_fusion_is_off,
    words_of_change,
)
from megatron_ext.proof.values import code_values, config_values, module_parts, module_values

__all__ = [
    "SAMPLE_TOKENS",
    "Proof",
    "ProofBasis",
    "ProofMode",
    "Proofs",
    "agreed",
    "cannot_prove_now",
    "code_values",
    "compare",
    "config_values",
    "error_words",
    "fusion_is_on",
    "module_parts",
    "module_values",
    "proof_mode",
    "warn_of_changes",
    "why_fusion_is_off",
    "words_of_change",
]

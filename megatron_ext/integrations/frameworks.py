"""Ways into other frameworks that would work here, and why the others would not, for the doctor's report."""

import contextlib
import io
import warnings

from megatron_ext.integrations import nemo_rl, trl, verl
from megatron_ext.optional_packages import why_not_importable

_OURS = {
    "integrations.nemo_rl.apply()": nemo_rl,
    "integrations.verl.apply()": verl,
    "integrations.trl.apply()": trl,
}
# Ways that need packages alone, as they are imported.
_NEED = {
    "dtensor (use_fused_loss, parallelize)": ("transformers",),
    "policy.DTensorPolicyWorker": ("transformers", "accelerate"),
    "policy.RayPolicy": ("ray", "psutil", "transformers"),
}


def ways() -> dict[str, str | None]:
    """Each way in: None where it would work, else why not, in one sentence. Imports what is installed of them."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        found = {way: module._substitution.why_not() for way, module in _OURS.items()}
        return found | {
            way: next(filter(None, map(why_not_importable, packages)), None) for way, packages in _NEED.items()
        }

"""Which ways into other frameworks would work here, and why the others would not: what the doctor says of them."""

import contextlib
import importlib
import io
import warnings

from megatron_ext.integrations import nemo_rl, trl, verl

_OURS = {
    "integrations.nemo_rl.apply()": nemo_rl,
    "integrations.verl.apply()": verl,
    "integrations.trl.apply()": trl,
}
# Ways that need packages alone, as they are imported.
_NEED = {
    "dtensor, policy.DTensorPolicyWorker": ("transformers",),
    "policy.RayPolicy": ("ray", "psutil", "transformers"),
}


def ways() -> dict[str, str | None]:
    """Each way in: None where it would work, else why not, in one sentence. Imports what is installed of them."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        found = {way: module._substitution.why_not() for way, module in _OURS.items()}
        return found | {way: _missing(packages) for way, packages in _NEED.items()}


def _missing(packages: tuple[str, ...]) -> str | None:
    for package in packages:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            if error.name == package:
                return f"{package} is not installed"
            return f"{package} cannot be imported: {error}"
        except Exception as error:  # whatever a broken package raises is a finding
            return f"{package} cannot be imported: {type(error).__name__}: {error}"
    return None

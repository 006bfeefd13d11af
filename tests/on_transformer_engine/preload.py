"""Enters the emulation with Transformer Engine for the rest of the process, before Megatron is imported."""

import atexit
from contextlib import ExitStack

from megatron_on_cpu import megatron_on_cpu

emulation = ExitStack()
emulation.enter_context(megatron_on_cpu(transformer_engine=True))
atexit.register(emulation.close)

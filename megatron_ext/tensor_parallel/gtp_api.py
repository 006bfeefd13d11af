"""The public names of generalized tensor parallelism: Megatron's own (see `generalized_tensor_parallelism`)."""

from megatron_ext.tensor_parallel.generalized_tensor_parallelism import megatrons_own

__getattr__ = megatrons_own("gtp_api")

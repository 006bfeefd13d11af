"""The table of seams against the Megatron-Core that is installed; refusals by name, and their advice followed."""

import pytest

from megatron_ext.megatron import substitute, versions
from tests.programs import python
from tests.tensor_parallel.test_signatures import minor

# What came later, and what our layers, specs and head do with it where it is there.
LATER = (
    versions.EXPERTS_BUILDER,  # a spec names experts by something to call, before by class and submodules
    versions.Seam("tensor_parallel.layers:ColumnParallelLinear.__init__(name)", since="0.18"),
    versions.Seam("models.gpt:GPTModel.forward(output_processor)", since="0.18"),
    versions.Seam("models.hybrid.hybrid_block:HybridStackSubmodules", since="0.18"),
    versions.Seam("tensor_parallel.mappings:all_to_all(use_nccl_stream)", since="0.18"),
    versions.Seam("tensor_parallel.gtp_api:HAVE_GTP", since="0.19"),
    versions.Seam("tensor_parallel.layers:ColumnParallelLinear.__init__(pg_collection)", since="0.20"),
    versions.Seam("tensor_parallel.layers:ColumnParallelLinear.__init__(output_dtype)", since="0.20"),
    versions.Seam("tensor_parallel.random:CheckpointWithoutOutputManager", since="0.20"),
)
EVERY = dict.fromkeys([*(seam for seams in versions.SEAMS.values() for seam in seams), *LATER])


@pytest.mark.parametrize("seam", EVERY, ids=lambda seam: seam.address)
def test_a_seam_is_where_the_table_says(seam):
    expected = minor(seam.since or versions.TESTED[0]) <= minor(versions.megatron_version())
    assert seam.is_there() == expected


def test_how_seams_are_found_and_told():
    assert not versions.Seam("no_such_module:X").is_there()
    assert not versions.Seam("models.gpt:NoSuchModel").is_there()
    assert not versions.Seam("models.gpt:GPTModel.forward(no_such_argument)").is_there()
    assert versions.Seam("models.gpt:GPTModel.forward(labels)").is_there()
    assert versions.Seam("a:b").versions == "all"
    assert versions.Seam("a:b", since="0.18").versions == "0.18 and newer"
    assert versions.is_tested("0.16.9")
    assert versions.is_tested("0.20.0+abcdef")
    assert not versions.is_tested("0.21.0")


def test_arguments_that_ours_do_not_take():
    def theirs(a, *, b=1, c=None, **rest):
        pass

    assert versions.unknown_arguments(theirs, lambda a, b: 0) == ["c"]
    assert versions.unknown_arguments(theirs, theirs) == []
    assert versions.unknown_arguments(theirs, lambda **all_: 0) == []


def run(code):
    done = python("-c", code, ignore_warnings=True)
    assert done.returncode == 0, done.stderr[-3000:]


BUILD = """
def train(spec):
    import torch
    from tests.gpt import loss_and_grads, model_parallel, tiny_batches, tiny_gpt
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with model_parallel():
        chunks = tiny_gpt(spec, num_layers=1)
        loss, _ = loss_and_grads(chunks, tiny_batches()[0])
    assert 3 < loss < 6, loss
    return {type(m).__module__.split(".")[0] for m in chunks[0].modules() if "ParallelLinear" in type(m).__name__}
"""


@pytest.mark.slow
def test_new_function_refuses_substitution_and_advises_a_spec():
    run(
        """
import megatron.core.tensor_parallel.layers as layers, megatron_ext, pytest
def gather_and_scatter(): pass
gather_and_scatter.__module__ = layers.__name__
layers.gather_and_scatter = gather_and_scatter
with pytest.raises(RuntimeError, match="does not know layers.gather_and_scatter") as raised:
    megatron_ext.substitute_tensor_parallel()
assert "layer spec instead (megatron_ext.megatron.layer_specs)" in str(raised.value)
"""
        + BUILD
        + """
from megatron_ext.megatron.layer_specs import gpt_layer_spec
assert "megatron_ext" in train(gpt_layer_spec)
"""
    )


def test_substitution_names_arguments_that_ours_lack(monkeypatch):
    assert substitute.why_not_substituted() is None
    monkeypatch.setattr(versions, "unknown_arguments", lambda theirs, ours: ["weight_dtype"])
    lacking = substitute.why_not_substituted()
    assert "layers.ColumnParallelLinear(weight_dtype=...)" in lacking
    assert "mappings._CopyToModelParallelRegion(" not in lacking  # whose callers call `apply`


@pytest.mark.slow
def test_a_new_argument_refuses_both_and_the_advised_patch_works():
    run(
        """
import inspect
import megatron.core.tensor_parallel.layers as layers, megatron_ext, pytest
init = layers.ColumnParallelLinear.__init__
known = inspect.signature(init)
new = inspect.Parameter("weight_dtype", inspect.Parameter.KEYWORD_ONLY, default=None)
init.__signature__ = known.replace(parameters=[*known.parameters.values(), new])
advice = "take the fused head alone: megatron_ext.model_utils.patch_gpt_model_forward_for_linear_ce_fusion()"
with pytest.raises(RuntimeError) as raised:
    megatron_ext.substitute_tensor_parallel()
assert "does not know layers.ColumnParallelLinear(weight_dtype=...)" in str(raised.value)
assert advice in str(raised.value)
for module in ("layer_specs", "hybrid_layer_specs"):
    with pytest.raises(ImportError) as raised:
        __import__("megatron_ext.megatron." + module)
    said = str(raised.value)
    assert advice in said
    assert "ColumnParallelLinear(weight_dtype=...)" in said or "HybridModel" in said, said
"""
        + BUILD
        + """
from megatron_ext.megatron.fusion_report import fusion_report
megatron_ext.model_utils.patch_gpt_model_forward_for_linear_ce_fusion()
assert train(None) == {"megatron"}
assert fusion_report().losses_fused
"""
    )


@pytest.mark.slow
@pytest.mark.skipif(versions.HYBRID_MODEL.is_there(), reason="this Megatron-Core has HybridModel")
def test_missing_hybrid_model_refuses_its_spec_with_advice():
    run(
        BUILD
        + """
import pytest
with pytest.raises(ImportError) as raised:
    import megatron_ext.megatron.hybrid_layer_specs
assert "has no models.hybrid.hybrid_model:HybridModel (0.18 and newer)" in str(raised.value)
assert "GPTModel with megatron_ext.megatron.layer_specs.gpt_layer_spec instead" in str(raised.value)
from megatron_ext.megatron.layer_specs import gpt_layer_spec
assert "megatron_ext" in train(gpt_layer_spec)
"""
    )

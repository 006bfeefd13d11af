#!/usr/bin/env bash
# usage: MEGATRON_LM=DIR examples/pretrain_llama3_8b.sh [--tiny] [--stock] [ARGS...]
#
# Pretrain Llama-3 8B with Megatron-LM's own pretrain_gpt.py, unmodified, and the loss from the fused head: one node of
# 8 GPUs, tensor parallel 8 with sequence parallelism, bf16, distributed optimizer. More nodes are data parallel: start
# the script on each, with torchrun's PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT set.
#
#   MEGATRON_LM  the folder of Megatron-LM, which has pretrain_gpt.py
#   DATA         prefixes of its indexed data sets; without it mock data
#   TOKENIZER    beside DATA: the folder of Llama 3's tokenizer
#   --tiny       the same model at toy size, in fp32 on two CPU processes, with mock data, in half a minute. Without
#                MEGATRON_LM this repository's examples/pretrain_gpt.py stands in for Megatron-LM's
#   --stock      Megatron's own loss, for comparison
#   ARGS         to pretrain_gpt.py, behind the arguments below: the last one counts, as in --train-iters 10
set -eo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
tiny= head=(--linear-ce)
while [[ $# -gt 0 ]]; do
    case $1 in
        --help | -h) sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p;}' "${BASH_SOURCE[0]}"; exit ;;
        --tiny) tiny=yes ;;
        --stock) head=() ;;
        *) break ;;
    esac
    shift
done
script=${MEGATRON_LM:+$MEGATRON_LM/pretrain_gpt.py}
if [[ -z $script && -z $tiny ]] || [[ -n $script && ! -f $script ]]; then
    echo "MEGATRON_LM is '${MEGATRON_LM-}': it must be a folder of Megatron-LM, with pretrain_gpt.py; or take --tiny" >&2
    exit 2
fi

model=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --swiglu --disable-bias-linear
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 --rotary-base 500000
    --normalization RMSNorm --norm-epsilon 1e-5 --untie-embeddings-and-output-weights --seq-length 8192
    --hidden-dropout 0 --attention-dropout 0
)
training=(
    --tensor-model-parallel-size 8 --sequence-parallel --micro-batch-size 1 --global-batch-size 512
    --train-iters 100000 --lr 3e-4 --min-lr 3e-5 --lr-warmup-iters 2000 --lr-decay-style cosine
    --weight-decay 0.1 --clip-grad 1.0
)
# Arguments of Megatron-LM alone: what they ask for is so in examples/pretrain_gpt.py. With divisible-by 16, eight ranks
# share 128256 words without a padded one.
megatron=(
    --position-embedding-type rope --max-position-embeddings 8192 --use-distributed-optimizer
    --make-vocab-size-divisible-by 16 --adam-beta1 0.9 --adam-beta2 0.95 --log-interval 1
    --eval-iters 0 --eval-interval 1000
)
data=(--vocab-size 128256 --mock-data)
tokenizer=(--tokenizer-type NullTokenizer)
nodes=() ranks=8 launcher=() precision=(--bf16 --overlap-grad-reduce --overlap-param-gather)
if [[ -n $tiny ]]; then
    nodes=(--standalone) ranks=2 launcher=(--cpu) precision=()
    model+=(--num-layers 2 --hidden-size 64 --ffn-hidden-size 160 --num-attention-heads 8 --num-query-groups 4)
    model+=(--seq-length 64 --use-cpu-initialization)
    training+=(--tensor-model-parallel-size 2 --global-batch-size 4 --train-iters 10 --lr 3e-3 --lr-warmup-iters 0)
    data=(--vocab-size 512 --mock-data)
    # The norms of the spec are sequence parallel without Apex and Transformer Engine.
    megatron+=(--spec megatron_ext.megatron.layer_specs gpt_layer_spec --num-workers 0)
elif [[ -n ${DATA-} ]]; then
    # shellcheck disable=SC2206  # several prefixes are several words
    data=(--data-path $DATA --split 99,1,0)
    tokenizer=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "${TOKENIZER:?beside DATA: its tokenizer}")
fi
if [[ -n $script ]]; then
    arguments=("${megatron[@]}" "${precision[@]}" "${tokenizer[@]}")
else # the same model and optimizer from Megatron-Core; its own head and layers, as the launcher brings ours
    script=$here/pretrain_gpt.py arguments=(--head stock --layers stock --device cuda)
fi
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} # which Megatron wants for sequence parallelism
exec torchrun "${nodes[@]}" --nproc-per-node "$ranks" -m megatron_ext.run "${launcher[@]}" "${head[@]}" "$script" \
    "${model[@]}" "${training[@]}" "${data[@]}" "${arguments[@]}" "$@"

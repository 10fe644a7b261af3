# Adapters on Qwen3-4B with groups filtered, as a script of miles says it.
LORA_ARGS=(
   --lora-rank 32 --lora-alpha 32 --lora-dropout 0.0
   --target-modules "all-linear"
   --megatron-to-hf-mode bridge
)
ROLLOUT_ARGS=(
   --prompt-data /root/dapo-math-17k.jsonl
   --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
   --rm-type math
   --num-rollout 300 --rollout-batch-size 16 --n-samples-per-prompt 8
   --rollout-max-response-len 2048 --rollout-temperature 1
   --over-sampling-batch-size 64
   --dynamic-sampling-filter-path miles.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
   --global-batch-size 128
)
EVAL_ARGS=(--eval-interval 5 --eval-prompt-data aime /root/aime-2024.jsonl --n-samples-per-eval-prompt 2)
MISC_ARGS=(--attention-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32)
python3 train.py \
   --actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 \
   --hf-checkpoint /root/Qwen3-4B --use-fault-tolerance \
   ${LORA_ARGS[@]} ${ROLLOUT_ARGS[@]} ${EVAL_ARGS[@]} ${MISC_ARGS[@]} \
   --tensor-model-parallel-size 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
   --use-dynamic-batch-size --max-tokens-per-gpu 9216 \
   --advantage-estimator grpo --eps-clip 0.2 --lr 1e-5 --use-wandb --wandb-project lora

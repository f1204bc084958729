#!/bin/sh
# GRPO with SkyRL 0.3.0: its FSDP trains, its vLLM serves, and the agents of a server ask it.
#
#     envserver serve --env math --openai.base_url none --openai.model_name Qwen/Qwen3-4B \
#         --rollouts.max_queued_groups 0 --env.group_size 8 --sampling.temperature 1
#     python -m envserver_clients.adapters.task_rows http://127.0.0.1:8000 math train.jsonl
#     ENVSERVER_URL=http://127.0.0.1:8000 sh configs/skyrl/math.sh
#
# More settings of SkyRL can follow. n_samples_per_prompt are the rollouts of a task, train_batch_size
# the tasks of a step; the temperature is the server's --sampling.temperature.
exec python -m envserver_clients.adapters.skyrl_training \
    data.train_data="['train.jsonl']" data.val_data="[]" \
    trainer.eval_interval=-1 trainer.eval_before_train=false \
    trainer.policy.model.path=Qwen/Qwen3-4B trainer.policy.optimizer_config.lr=1.0e-6 \
    trainer.algorithm.advantage_estimator=grpo trainer.algorithm.use_kl_loss=false \
    trainer.placement.colocate_all=true trainer.placement.policy_num_gpus_per_node=8 \
    trainer.train_batch_size=64 trainer.policy_mini_batch_size=64 \
    trainer.max_prompt_length=2048 trainer.logger=console \
    generator.n_samples_per_prompt=8 generator.max_input_length=2048 \
    generator.sampling_params.max_generate_length=4096 generator.sampling_params.temperature=1.0 \
    generator.inference_engine.num_engines=8 generator.inference_engine.tensor_parallel_size=1 \
    "$@"

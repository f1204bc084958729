"""Names of Atropos' command line that have another meaning, or none, here.

Command lines and YAML files written for Atropos work: a name in `EQUIVALENTS` is read as the
equivalent setting, a name in `IGNORED` is accepted with a warning that says what replaces it, and a
name in `REFUSED` is an error unless it is switched off. A setting of the environment with the same
name takes precedence over all three. (The fields of `BaseEnvConfig`, `APIServerConfig` and
`ServerManagerConfig` of atroposlib 0.4.0.)
"""

from __future__ import annotations

EQUIVALENTS: dict[str, str] = {
    "env.max_batches_offpolicy": "rollouts.max_batches_offpolicy",
    "env.max_concurrent_processes": "workers.dedicated",
    "env.process_timeout": "env.worker_timeout",
    "env.dataset_path": "env.data_path",
    "env.agent_verbosity": "env.verbosity",
}

_METRICS = "metrics are served at /metrics and shown while a command runs"
_WANDB = "`--track wandb` sends them to Weights & Biases"
_PROMPTS = "prompts belong to the environment; see its own --env.* settings"
_EVALUATION = "training and evaluation are separate commands"
_ALONE = "one environment runs at a time"
_RUBRIC = "the environment decides what counts; see --env.rubric.*"
_EXACT = "token ids come from the engine, so no tokenizer is needed"

IGNORED: dict[str, str] = {
    "env.use_wandb": _WANDB,
    "env.wandb_name": _WANDB,
    "env.num_rollouts_to_keep": _METRICS,
    "env.num_rollouts_per_group_for_logging": _METRICS,
    "env.min_items_sent_before_logging": _METRICS,
    "env.tokenizer_name": _EXACT,
    "env.rollout_server_url": "`envserver serve` is the server itself; see --server.port",
    "env.batch_size": "the trainer sets its batch size when it registers",
    "env.inference_weight": _ALONE,
    "env.min_batch_allocation": _ALONE,
    "env.max_num_workers": "see --rollouts.max_concurrent",
    "env.max_num_workers_per_node": "see --rollouts.max_concurrent",
    "env.max_eval_workers": _EVALUATION,
    "env.steps_per_eval": _EVALUATION,
    "env.eval_handling": _EVALUATION,
    "env.eval_limit_ratio": _EVALUATION,
    "env.data_dir_to_save_evals": _EVALUATION,
    "env.use_chat_completion": "agents may use any API",
    "env.scoring_strategy": _RUBRIC,
    "env.length_penalty_weight": _RUBRIC,
    "env.debug_scoring": _RUBRIC,
    "env.save_full_traces": "each agent's trace is in its trajectory",
    "env.thinking_mode": _PROMPTS,
    "env.reasoning_effort": _PROMPTS,
    "env.max_reasoning_tokens": _PROMPTS,
    "env.custom_thinking_prompt": _PROMPTS,
    "openai.num_requests_for_eval": _EVALUATION,
    "openai.rolling_buffer_length": "it was never used",
    "openai.tokenizer_name": _EXACT,
    "openai.n_kwarg_is_ignored": "each rollout requests one completion at a time",
    "openai.health_check": "engine health is judged by its answers",
    "tasks_per_step": "rows are written as their groups finish",
    "max_n_completions": "each rollout requests one completion at a time",
    "proxy_url": "the recording proxy is part of the server",
}

REFUSED: dict[str, str] = {
    "output": "Use --out.",  # this and the next: our own names, until 0.2
    "sandbox.wall": "Use --sandbox.backend.",
    "slurm": "Give the engines' addresses: --openai.base_url http://a:8000/v1,http://b:8000/v1",
    "api_url": "Rollouts are made here; `atropos-sft-gen` fetches them from a server.",
    "testing": "Use the simulated engine: --model sim",
}

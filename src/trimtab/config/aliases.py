"""Names from PEFT, ms-swift, LLaMA-Factory and Megatron, and what Trimtab calls them.

Knows: names. Does not know: recipes. A recipe that uses one of these is refused with our name in
the message, so that every recipe has one spelling.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        # the model
        "model_name_or_path": "model.path",
        "model_id": "model.path",
        "model_revision": "model.revision",
        "load": "model.path",
        # adapters
        "r": "finetune.lora.rank",
        "lora_r": "finetune.lora.rank",
        "lora_rank": "finetune.lora.rank",
        "lora_alpha": "finetune.lora.alpha",
        "lora_dropout": "finetune.lora.dropout",
        "lora_target": "finetune.lora.target_modules",
        "lora_target_modules": "finetune.lora.target_modules",
        "lora_modules": "finetune.lora.target_modules",
        "use_rslora": "finetune.lora.scaling",
        "loraplus_lr_ratio": "finetune.optimizer.lora_b_lr_ratio",
        "lorap_lr_ratio": "finetune.optimizer.lora_b_lr_ratio",
        "finetuning_type": "finetune.method",
        "tuner_type": "finetune.method",
        "train_type": "finetune.method",
        "torch_dtype": "finetune.base_dtype",
        # the optimizer
        "learning_rate": "finetune.optimizer.lr",
        "lr_scheduler_type": "finetune.optimizer.scheduler",
        "lr_decay_style": "finetune.optimizer.scheduler",
        "lr_warmup_fraction": "finetune.optimizer.warmup_ratio",
        "clip_grad": "finetune.optimizer.max_grad_norm",
        "gradient_clipping": "finetune.optimizer.max_grad_norm",
        "vit_lr": "finetune.optimizer.lr_by_branch",
        "aligner_lr": "finetune.optimizer.lr_by_branch",
        # routers
        "router_aux_loss_coef": "finetune.router.aux_loss_coef",
        "moe_aux_loss_coeff": "finetune.router.aux_loss_coef",
        "moe_aux_loss_coef": "finetune.router.aux_loss_coef",
        "moe_router_load_balancing_type": "finetune.router.balance",
        # length and batch
        "max_steps": "finetune.steps",
        "train_iters": "finetune.steps",
        "num_train_epochs": "finetune.epochs",
        "per_device_train_batch_size": "finetune.batch.micro_batch_tokens",
        "micro_batch_size": "finetune.batch.micro_batch_tokens",
        "global_batch_size": "finetune.batch.tokens_per_step",
        "train_batch_size": "finetune.batch.tokens_per_step",
        "gradient_accumulation_steps": "finetune.batch.tokens_per_step",
        "gradient_checkpointing": "finetune.recompute",
        "recompute_granularity": "finetune.recompute",
        "freeze_vit": "finetune.vision.tower",
        "freeze_vision_tower": "finetune.vision.tower",
        "freeze_aligner": "finetune.vision.projector",
        "freeze_multi_modal_projector": "finetune.vision.projector",
        # data
        "dataset": "finetune.data.domain.path",
        "train_data_path": "finetune.data.domain.path",
        "data_path": "finetune.data.domain.path",
        "cutoff_len": "finetune.data.max_seq_len",
        "max_length": "finetune.data.max_seq_len",
        "max_seq_length": "finetune.data.max_seq_len",
        "model_max_length": "finetune.data.max_seq_len",
        "seq_length": "finetune.data.max_seq_len",
        "sequence_len": "finetune.data.max_seq_len",
        "truncation_strategy": "finetune.data.overlong",
        "sample_packing": "finetune.data.packing",
        "neat_packing": "finetune.data.packing",
        "val_dataset": "evaluate.domain",
        "eval_dataset": "evaluate.domain",
        # parallelism
        "expert_model_parallel_size": "parallel.ep",
        "expert_parallel_size": "parallel.ep",
        "tensor_model_parallel_size": "parallel.tp",
        "tensor_parallel_size": "parallel.tp",
        "pipeline_model_parallel_size": "parallel.pp",
        "pipeline_parallel_size": "parallel.pp",
        "context_parallel_size": "parallel.cp",
        "sequence_parallel_size": "parallel.cp",
        "moe_token_dispatcher_type": "parallel.dispatcher",
        "moe_expert_capacity_factor": "parallel.capacity_factor",
        # the run
        "output_dir": "output",
        "save": "output",
        "save_steps": "checkpoint.every_steps",
        "save_interval": "checkpoint.every_steps",
        "save_total_limit": "checkpoint.keep",
        "report_to": "track",
    }
)
"""Foreign key to the dotted path of ours."""

NOTES: Mapping[str, str] = MappingProxyType(
    {
        "gradient_accumulation_steps": "accumulation follows from tokens_per_step and "
        "micro_batch_tokens",
        "per_device_train_batch_size": "sizes are in tokens of the whole job, not samples "
        "per device",
        "micro_batch_size": "sizes are in tokens, not samples",
        "global_batch_size": "sizes are in tokens, not samples",
        "train_batch_size": "sizes are in tokens, not samples",
        "use_rslora": "write `scaling: rslora`",
        "gradient_checkpointing": "write `recompute: layer` or `recompute: none`",
    }
)
"""What to know where the two keys do not mean quite the same."""

"""Every private name of Lightning, torch and DeepSpeed that the source uses is still there, or is named here."""

import importlib
import re
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[3]

# The module, or module:class, and the names in it. Checked with torch 2.11 to 2.15 and Lightning 2.6.0 to 2.6.6.
NAMES = {
    "lightning.fabric.utilities.distributed": ["_set_num_threads_if_needed"],
    "lightning.pytorch.overrides.distributed": ["_sync_module_states", "prepare_for_backward"],
    "lightning.pytorch.strategies.launchers.multiprocessing:_MultiProcessingLauncher": [
        *("_collect_rank_zero_results", "get_extra_results", "update_main_process_results"),
    ],
    "lightning.pytorch.strategies.launchers.multiprocessing": ["_WorkerOutput"],
    "lightning.pytorch.strategies.launchers": ["_MultiProcessingLauncher", "_SubprocessScriptLauncher"],
    "lightning.pytorch.strategies.launchers.launcher": ["_Launcher"],
    "lightning.pytorch.strategies.launchers.subprocess_script": ["_basic_subprocess_cmd"],
    "lightning.pytorch.strategies.launchers.subprocess_script:_SubprocessScriptLauncher": [
        "_call_children_scripts",
        "_check_can_spawn_children",
    ],
    "lightning.pytorch.trainer.call": ["_call_callback_hooks", "_call_lightning_module_hook"],
    "lightning.pytorch.strategies:DDPStrategy": ["_configure_launcher"],
    "lightning.pytorch.loops.training_epoch_loop:_TrainingEpochLoop": ["_broadcast_sigterm_tensor"],
    "lightning.pytorch.core:LightningModule": ["on_validation_model_zero_grad"],
    "torch": ["_foreach_mul_", "_foreach_norm", "_foreach_copy_"],
    "torch._C._autograd": ["_get_current_graph_task_keep_graph"],
    "torch._C._distributed_c10d:Work": ["_source_rank"],
    "torch._C": ["_current_graph_task_id", "DisableTorchFunctionSubclass", "_DisableFuncTorch"],
    "torch._dynamo.config": ["recompile_limit"],
    "torch._dynamo.exc": ["TorchDynamoException"],
    "torch._dynamo.trace_rules": ["get_torch_obj_rule_map"],
    "torch.autograd": ["_engine_run_backward"],
    "torch.testing._internal.distributed.fake_pg": ["FakeStore"],
    "torch._functorch.config": ["donated_buffer"],
    "torch.distributed": ["_broadcast_coalesced"],
    "torch.distributed.distributed_c10d": ["_get_default_store", "_set_pg_timeout"],
    "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent": [
        "_monitor_workers",
        "_restart_workers",
        "_start_workers",
    ],
    "torch.distributed._composable.contract": ["REGISTRY_KEY", "STATE_KEY"],
    "torch.distributed._composable_state": ["_module_state_mapping"],
    "torch.distributed.fsdp._fully_shard._fsdp_common:TrainingState": ["FORWARD", "IDLE", "PRE_BACKWARD"],
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam": ["_setattr_on_modules", "reset_sharded_param"],
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup": [
        "finalize_backward",
        "post_backward",
        "reshard",
        "unshard",
        "wait_for_unshard",
    ],
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState": ["_lazy_init", "_post_forward", "_pre_forward"],
    "torch.nn.modules.batchnorm": ["_BatchNorm"],
    "torch.utils.data._utils.signal_handling": ["_SIGCHLD_handler_set", "_set_SIGCHLD_handler"],
    "torch.utils._pytree": ["tree_flatten", "tree_unflatten", "tree_leaves", "tree_map"],
    "torch.optim:Optimizer": ["register_step_pre_hook"],
}


@pytest.mark.parametrize("place", NAMES)
def test_a_private_name_is_still_there(place):
    module, _, inner = place.partition(":")
    found = importlib.import_module(module)
    found = getattr(found, inner) if inner else found
    lost = [name for name in NAMES[place] if not hasattr(found, name)]
    assert not lost, f"this version of {module.partition('.')[0]} has no {', '.join(lost)} in {place} any more"


def test_what_a_trainer_keeps_is_still_there():
    from lightning import Trainer

    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, barebones=True)
    assert hasattr(trainer._logger_connector, "should_update_logs")
    assert hasattr(trainer._accelerator_connector, "use_distributed_sampler")
    assert hasattr(trainer._signal_connector, "_sigterm_notifier_fn")
    assert hasattr(trainer._signal_connector, "_slurm_sigusr_handler_fn")
    assert hasattr(trainer._accelerator_connector, "cluster_environment")
    assert hasattr(trainer._checkpoint_connector, "hpc_save_path")
    for name in ("_select_ckpt_path", "restore_model", "restore_callbacks", "restore_training_state"):
        assert hasattr(trainer._checkpoint_connector, name)
    assert hasattr(trainer.fit_loop.epoch_loop.manual_optimization, "optim_step_progress")


def test_modules_keep_their_parameters_and_compiled_calls_where_they_did():
    from torch import nn

    module = nn.Linear(2, 2)
    assert isinstance(module._parameters, dict) and isinstance(module._buffers, dict)
    module.compile(backend="eager")
    assert module._compiled_call_impl is not None


def test_private_imports_stand_in_the_list():
    """An import of a private name that is not in NAMES would break unnoticed."""
    listed = {name for names in NAMES.values() for name in names} | {"_pytree"}
    pattern = re.compile(r"^from (?:lightning|torch)[\w.]* import (.+)$", re.M)
    for path in [*PACKAGES.glob("strategies/**/*.py"), *PACKAGES.glob("gan/**/*.py")]:
        for imported in pattern.findall(path.read_text()):
            private = {word for word in re.findall(r"\b_[a-z]\w*", imported.split(" as ")[0])}
            assert private <= listed, f"{path.name} imports {private - listed}; add it to NAMES"


def test_fsdp2_keeps_what_a_unit_uses_where_it_did():
    """What is made when a network is wrapped, so no class has it."""
    import torch.distributed as dist
    from torch import nn
    from torch.distributed._composable_state import _module_state_mapping
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        network = nn.Linear(2, 2)
        fully_shard(network, mesh=DeviceMesh.from_group(dist.group.WORLD, "cpu"))
        state = fully_shard.state(network)
        assert network in _module_state_mapping
        assert hasattr(state, "_pre_forward_hook_handle") and hasattr(state, "_post_forward_hook_handle")
        (group,) = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for name in ("_training_state", "comm_ctx", "mesh_info", "post_forward_mesh_info", "reduce_grads"):
            assert hasattr(group, name), name
        for name in ("reshard_after_backward", "_module_to_pre_load_state_dict_hook_handle"):
            assert hasattr(group, name), name
        assert hasattr(group, "_module_to_pre_save_state_dict_hook_handle")
        state._lazy_init()
        assert hasattr(group.comm_ctx, "post_forward_order")
        assert hasattr(group.comm_ctx, "reduce_scatter_states") or hasattr(group.comm_ctx, "reduce_scatter_state")
        part = group.fsdp_params[0]
        for name in ("_module_info", "_post_load_hook_handle", "_sharded_param_data", "padded_sharded_param_size"):
            assert hasattr(part, name), name
        for name in ("all_gather_outputs", "device", "offload_to_cpu", "orig_dtype", "param_dtype", "sharded_param"):
            assert hasattr(part, name), name
        assert part._module_info.module is network and part._module_info.param_name == "weight"
        assert hasattr(part.mesh_info, "shard_mesh_rank") and hasattr(part.mesh_info, "shard_process_group")
    finally:
        dist.destroy_process_group()

"""Everything of vLLM that steerscope wraps, calls, reads or imports, as one table.

`bench/vllm_surface.py` looks each entry up in the source of every supported version and writes what it finds to
bench/results/vllm_surface.json; tests hold our wrappers and calls against that file, and every import of vLLM in
src/ against this table. A target is `module:name` or `module:Class.method`.
"""

from typing import NamedTuple

_V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_OUTPUTS = "vllm.v1.engine.output_processor"


class Wrapped(NamedTuple):
    """A method of vLLM that is replaced by one of ours."""

    target: str
    wrapper: str  # module:name, below steerscope: it takes the method, its object, and what the method takes
    receivers: tuple[str, ...]  # names of the object in vLLM's calls
    absent_in: str | None = None  # a class without it: whether it is there tells the two apart


class Called(NamedTuple):
    """A function or class of vLLM that we call."""

    target: str
    callers: tuple[str, ...]  # our modules, below steerscope
    name: str = ""  # what we call it, if not by its own name


class Read(NamedTuple):
    """Attributes that must be there, and those that are looked for and may be missing."""

    target: str
    attributes: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


_WORKER, _FRONT = "engines.vllm.worker.worker:WorkerTaps", "engines.vllm.client.stock_frontend"
WRAPPED = (
    Wrapped("vllm.engine.arg_utils:EngineArgs.create_engine_config", "engines.vllm.plugin:_create_engine_config",
            ("engine_args", "async_engine_args")),
    Wrapped("vllm.v1.worker.gpu_worker:Worker.load_model", "engines.vllm.plugin:_load_model",
            ("worker", "driver_worker")),
    Wrapped("vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model", f"{_WORKER}._after_warm_up",
            ("worker", "model_executor")),
    Wrapped("vllm.v1.worker.cpu_worker:CPUWorker.compile_or_warm_up_model", f"{_WORKER}._after_warm_up",
            ("worker", "model_executor")),
    Wrapped(f"{_V1}.execute_model", f"{_WORKER}._around_step", ("model_runner",)),
    Wrapped(f"{_V2}.execute_model", f"{_WORKER}._around_step", ("model_runner", "self")),
    Wrapped(f"{_V1}._model_forward", f"{_WORKER}._before_forward", ("self",), absent_in=_V2),
    Wrapped(f"{_V1}._dummy_run", f"{_WORKER}._before_dummy", ("self", "model_runner", "runner")),
    Wrapped(f"{_V2}.prepare_inputs", f"{_WORKER}._after_inputs", ("self",)),
    Wrapped(f"{_V2}.capture_model", "engines.vllm.worker.graph_sets:GraphSets.capture", ("model_runner", "runner")),
    Wrapped(f"{_V2}.profile_cudagraph_memory", "engines.vllm.worker.graph_sets:GraphSets.profile", ("model_runner",)),
    Wrapped("vllm.v1.engine.input_processor:InputProcessor.process_inputs", f"{_FRONT}:process_inputs",
            ("input_processor",)),
    Wrapped(f"{_OUTPUTS}:OutputProcessor.add_request", f"{_FRONT}:add_request", ("output_processor",)),
    Wrapped(f"{_OUTPUTS}:OutputProcessor.process_outputs", f"{_FRONT}:process_outputs", ("output_processor",)),
    Wrapped(f"{_OUTPUTS}:RequestState._new_completion_output", f"{_FRONT}:new_completion_output", ("self",)),
)  # fmt: skip

# Methods of ours that vLLM calls: those of an endpoint plugin.
_PLUGIN = "vllm.plugins.endpoint_plugins.interface:EndpointPlugin"
GIVEN = (
    Wrapped(f"{_PLUGIN}.attach_router", "serving.vllm_routes:Plugin.attach_router", ("plugin",)),
    Wrapped(f"{_PLUGIN}.init_state", "serving.vllm_routes:Plugin.init_state", ("plugin",)),
)

_LLM, _CORE, _CONFIG = (
    "vllm.v1.engine.llm_engine:LLMEngine",
    "vllm.v1.engine.core_client:EngineCoreClient",
    "vllm.config",
)
CALLED = (
    Called("vllm.engine.arg_utils:EngineArgs.create_engine_config", ("engines.vllm.client.start",)),
    Called(f"{_LLM}.from_engine_args", ("engines.vllm.client.start", "bench.drivers")),
    Called(f"{_LLM}.reset_prefix_cache", ("engines.vllm.client.core_outputs",)),
    Called(f"{_LLM}.collective_rpc", ("engines.vllm.client.engine",)),
    Called(f"{_LLM}.step", ("engines.vllm.client.core_outputs",)),
    Called(f"{_LLM}.abort_request", ("engines.vllm.client.core_outputs",)),
    Called(f"{_LLM}.get_supported_tasks", ("engines.vllm.client.submit",)),
    Called(f"{_CORE}.get_output", ("engines.vllm.client.core_outputs",)),
    Called(f"{_CORE}.abort_requests", ("engines.vllm.client.core_outputs",)),
    Called(f"{_CORE}.shutdown", ("engines.vllm.client.engine",)),
    Called("vllm.v1.engine.input_processor:InputProcessor.process_inputs", ("engines.vllm.client.submit",)),
    Called(f"{_OUTPUTS}:OutputProcessor.process_outputs", ("engines.vllm.client.core_outputs",)),
    Called("vllm.v1.engine.exceptions:EngineDeadError", ("engines.vllm.client.start",)),
    Called("vllm.distributed.parallel_state:get_pp_group", ("engines.vllm.worker.worker",)),
    Called("vllm.distributed.parallel_state:get_tp_group", ("engines.vllm.worker.worker",)),
    Called("vllm.distributed.utils:get_pp_indices", ("engines.vllm.client.stock_frontend",)),
    Called("vllm.platforms.interface:Platform.get_device_total_memory", ("engines.vllm.client.start",)),
    Called("vllm.platforms.interface:Platform.is_cpu", ("engines.vllm.client.start", "engines.vllm.guards")),
    Called(f"{_CONFIG}.model:ModelConfig.get_hidden_size", ("engines.vllm.guards", "engines.vllm.worker.worker")),
    Called(f"{_CONFIG}.model:ModelConfig.try_get_generation_config", ("engines.vllm.client.start",)),
    Called(f"{_V1}.get_model", ("engines.vllm.worker.worker",)),
    Called(f"{_V2}.get_model", ("engines.vllm.worker.worker",)),
    Called(f"{_V1}._dummy_run", ("engines.vllm.worker.worker_check",), "dummy_run"),
    Called(f"{_V2}._dummy_run", ("engines.vllm.worker.worker_check",), "dummy_run"),
)

READ = (
    # Classes whose fields we name when we make them.
    Read("vllm.engine.arg_utils:EngineArgs",
         ("model", "additional_config", "disable_log_stats", "max_num_seqs", "dtype", "gpu_memory_utilization",
          "otlp_traces_endpoint")),
    Read("vllm.sampling_params:SamplingParams",
         ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty",
          "presence_penalty", "seed", "ignore_eos", "logprobs", "skip_reading_prefix_cache", "detokenize",
          "output_kind", "skip_clone", "extra_args", "n")),
    Read(f"{_CONFIG}.kv_transfer:KVTransferConfig", ("kv_connector", "kv_role", "kv_connector_extra_config")),
    Read("vllm.sampling_params:RequestOutputKind", ("DELTA", "FINAL_ONLY")),
    # The configuration.
    Read(f"{_CONFIG}.vllm:VllmConfig",
         ("model_config", "parallel_config", "scheduler_config", "cache_config", "compilation_config", "lora_config",
          "speculative_config", "kv_transfer_config", "additional_config")),
    Read(f"{_CONFIG}.model:ModelConfig",
         ("model", "dtype", "hf_config", "hf_text_config", "max_model_len", "runner_type", "quantization",
          "enforce_eager", "enable_sleep_mode", "enable_prompt_embeds")),
    Read(f"{_CONFIG}.parallel:ParallelConfig",
         ("pipeline_parallel_size", "enable_dbo", "use_ubatching", "prefill_context_parallel_size",
          "decode_context_parallel_size", "data_parallel_size", "_api_process_count"), ("enable_hc_sp",)),
    Read(f"{_CONFIG}.scheduler:SchedulerConfig", ("max_num_batched_tokens", "max_num_seqs", "async_scheduling")),
    Read(f"{_CONFIG}.cache:CacheConfig", ("enable_prefix_caching", "kv_sharing_fast_prefill")),
    Read(f"{_CONFIG}.compilation:CompilationConfig",
         ("pass_config", "cudagraph_capture_sizes", "cudagraph_mode", "mode")),
    Read(f"{_CONFIG}.compilation:PassConfig", (), ("enable_sp",)),
    Read("vllm.envs", ("VLLM_BATCH_INVARIANT",)),
    Read("vllm.exceptions", (), ("VLLMClientError",)),
    Read("vllm.platforms", ("current_platform",)),
    # Workers.
    Read("vllm.v1.worker.gpu_worker:Worker", ("vllm_config", "model_runner")),
    Read("vllm.v1.worker.cpu_worker:CPUWorker", ("vllm_config", "model_runner", "load_model")),
    Read(_V1, ("device", "vllm_config", "input_batch", "requests", "query_start_loc", "discard_request_mask",
               "async_output_copy_stream", "model_memory_usage", "execute_model_state")),
    Read(_V2, ("device", "vllm_config", "cudagraph_manager", "output_copy_stream", "model_memory_usage",
               "execute_model_state")),
    Read("vllm.v1.worker.gpu_input_batch:InputBatch", ("req_ids", "num_computed_tokens_cpu", "generators")),
    Read("vllm.v1.worker.gpu_input_batch:CachedRequestState", ("generator",)),
    Read("vllm.v1.worker.gpu.input_batch:InputBatch", ("req_ids", "query_start_loc_np", "num_computed_tokens_np")),
    Read("vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager", ("graphs", "_capture_descs"),
         ("_capture_mem_samples",)),
    Read("vllm.v1.core.sched.output:SchedulerOutput",
         ("finished_req_ids", "scheduled_new_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens")),
    Read("vllm.v1.core.sched.output:NewRequestData", ("req_id", "sampling_params", "num_computed_tokens")),
    Read("vllm.distributed.parallel_state:GroupCoordinator", ("rank_in_group",)),
    # The engine in the client.
    Read("vllm.usage.usage_lib:UsageContext", ("OPENAI_API_SERVER",)),
    Read("vllm.v1.core.sched.scheduler:Scheduler", ("requests",)),
    Read("vllm.v1.request:Request", ("status",)),
    Read("vllm.v1.request:RequestStatus", ("WAITING",)),
    Read(_LLM, ("engine_core", "input_processor", "output_processor", "vllm_config", "log_stats")),
    Read("vllm.v1.engine.core_client:SyncMPClient", ("outputs_queue", "resources", "utility_results")),
    Read("vllm.v1.engine.core_client:BackgroundResources", ("engine_dead",)),
    Read("vllm.v1.engine.input_processor:InputProcessor", ("vllm_config",)),
    Read(f"{_OUTPUTS}:OutputProcessor", ("request_states", "tracing_enabled", "stream_interval")),
    Read(f"{_OUTPUTS}:OutputProcessorOutput", ("reqs_to_abort", "request_outputs")),
    Read(f"{_OUTPUTS}:RequestState", ("detokenizer",)),
    Read("vllm.v1.engine.detokenizer:IncrementalDetokenizer", ("output_token_ids",)),
    Read("vllm.v1.engine:EngineCoreRequest",
         ("request_id", "external_req_id", "prompt_token_ids", "sampling_params", "cache_salt", "arrival_time",
          "resumable")),
    Read("vllm.v1.engine:EngineCoreOutput",
         ("request_id", "new_token_ids", "finish_reason", "stop_reason", "finished")),
    Read("vllm.v1.engine:EngineCoreOutputs", ("outputs",)),
    Read("vllm.v1.engine:FinishReason", ("ERROR", "ABORT")),
    Read("vllm.outputs:RequestOutput", ("request_id", "outputs", "finished")),
    Read("vllm.outputs:CompletionOutput", ("token_ids", "logprobs", "finish_reason")),
    Read("vllm.logprobs:Logprob", ("rank", "logprob")),
    # The proof of layers: what runs compiled, and what reads the cache.
    Read("vllm.compilation.decorators:_support_torch_compile", ("do_not_compile",)),
    Read("vllm.model_executor.layers.attention_layer_base:AttentionLayerBase"),
    # Models: the norms, and the layers whose next norm is known (`layers._NORM_FOLLOWS`).
    Read("vllm.model_executor.layers.layernorm:RMSNorm", ("weight", "variance_epsilon", "variance_size_override")),
    Read("vllm.model_executor.layers.layernorm:GemmaRMSNorm", ("weight", "variance_epsilon")),
    Read("vllm.model_executor.models.utils:PPMissingLayer"),
    Read("vllm.model_executor.models.llama:LlamaDecoderLayer", ("input_layernorm",)),
    Read("vllm.model_executor.models.mistral:MistralDecoderLayer", ("input_layernorm",)),
    Read("vllm.model_executor.models.qwen2:Qwen2DecoderLayer", ("input_layernorm",)),
    Read("vllm.model_executor.models.qwen3:Qwen3DecoderLayer", ("input_layernorm",)),
    Read("vllm.model_executor.models.qwen3_moe:Qwen3MoeDecoderLayer", ("input_layernorm",)),
    Read("vllm.model_executor.models.gemma:GemmaDecoderLayer", ("input_layernorm",)),
    Read("vllm.model_executor.models.gemma2:Gemma2DecoderLayer", ("input_layernorm",)),
    Read("vllm.model_executor.models.gemma3:Gemma3DecoderLayer", ("input_layernorm",)),
    # The benchmark programs alone.
    Read("vllm.entrypoints.llm:LLM", ("llm_engine", "generate")),
    Read("vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector", ("load_hidden_states",)),
)  # fmt: skip

# Imports in this package by another road than the module of the target they name.
IMPORTS = {
    "vllm": "vllm",
    "vllm:LLM": "vllm.entrypoints.llm:LLM",
    "vllm:EngineArgs": "vllm.engine.arg_utils:EngineArgs",
    "vllm:SamplingParams": "vllm.sampling_params:SamplingParams",
    "vllm:envs": "vllm.envs",
    "vllm:exceptions": "vllm.exceptions",
    "vllm.config:VllmConfig": f"{_CONFIG}.vllm:VllmConfig",
    "vllm.config:KVTransferConfig": f"{_CONFIG}.kv_transfer:KVTransferConfig",
    "vllm.distributed:get_pp_group": "vllm.distributed.parallel_state:get_pp_group",
    "vllm.distributed:get_tp_group": "vllm.distributed.parallel_state:get_tp_group",
    "vllm.platforms:current_platform": "vllm.platforms",
    "vllm.distributed.kv_transfer.kv_connector.v1:example_hidden_states_connector":
        "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector",
}  # fmt: skip

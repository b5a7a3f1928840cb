"""decode.py CHECKPOINT qwen|qwen-fp8|gpt off|on OUT: SGLang's ModelRunner decodes greedily, without or with oxmoe.

It runs in SGLang's environment, beside the output of checkpoint.py:

    python benches/sglang/checkpoint.py qwen-4 qwen && mkdir -p out
    python benches/sglang/decode.py qwen-4 qwen off out
    python benches/sglang/decode.py qwen-4 qwen on out

`on` compares with the results that `off` left in OUT: tokens when each feeds its own, tokens and logits when both are
fed the same, and a decode step's time. The random model's next tokens stand out as a trained one's do (checkpoint.py).
Both may run at once; timing is done by one of them at a time.
"""

import fcntl
import os
import sys
import time

import torch

checkpoint, kind, mode, out = sys.argv[1:5]
os.environ["OXMOE_SGLANG"] = "moe" if mode == "on" else ""
t0 = time.time()
import logging

logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
from sglang.srt.plugins import load_plugins

load_plugins()
from oxmoe.sglang import sglang_version

new = sglang_version() == "0.5.23"
if new:
    from sglang.benchmark import one_batch as bench
else:
    from sglang import bench_one_batch as bench
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import PortArgs, ServerArgs

options = {}
if mode == "on":
    # A bf16 checkpoint gets oxmoe's quantization by name. Other checkpoints get it by themselves, MXFP4 with top-k from
    # SGLang's kernel.
    options = {"qwen": {"quantization": "oxmoe"}, "gpt": {"moe_runner_backend": "triton"}}.get(kind, {})
elif kind == "gpt":
    options = {"moe_runner_backend": "triton_kernel"}
if new:
    options |= {"cuda_graph_bs_decode": [1, 4, 16, 64], "cuda_graph_max_bs_decode": 64}
    options |= {"cuda_graph_backend_prefill": "disabled"}
else:
    options |= {"cuda_graph_bs": [1, 4, 16, 64], "cuda_graph_max_bs": 64, "disable_piecewise_cuda_graph": True}
args = ServerArgs(
    model_path=checkpoint,
    skip_tokenizer_init=True,
    dtype="bfloat16",
    attention_backend="triton",
    sampling_backend="pytorch",
    grammar_backend="none",
    mem_fraction_static=0.6,
    max_total_tokens=65536,
    max_running_requests=128,
    disable_radix_cache=True,
    disable_overlap_schedule=True,
    random_seed=1,
    log_level="info",
    **options,
)


def old_runner():
    """Makes 0.5.12.post1's runner, as its bench_one_batch does."""
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config

    initialize_moe_config(args)
    initialize_fp8_gemm_config(args)
    initialize_fp4_gemm_config(args)
    ranks = {name: 0 for name in ("gpu_id", "tp_rank", "moe_ep_rank", "pp_rank")}
    return ModelRunner(
        model_config=ModelConfig.from_server_args(args),
        mem_fraction_static=args.mem_fraction_static,
        tp_size=1,
        moe_ep_size=1,
        pp_size=1,
        nccl_port=PortArgs.init_new(args).nccl_port,
        server_args=args,
        **ranks,
    )


def new_runner():
    """Makes 0.5.23's runner, as its benchmark.one_batch does, without a tokenizer."""
    from sglang.srt.distributed import bootstrap
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank

    args.resolve_once()
    bench._set_envs_and_config(args)
    port = PortArgs.init_new(args).nccl_port
    publish(
        args,
        role="scheduler",
        ranks=SpawnRanks(world_rank=spawn_world_rank(args, tp_rank=0, pp_rank=0), gpu_id=0),
    )
    bench._init_process_global_configs()
    model = ModelConfig.from_server_args(args)
    bootstrap.init_parallel_runtime(server_args=args, device="cuda", dist_port=port)
    bootstrap.init_layer_runtime(model_config=model)
    made = ModelRunner(
        model_config=model,
        mem_fraction_static=bench.resolving_view(args).mem_fraction_static,
        gpu_id=0,
        nccl_port=port,
        server_args=args,
    )
    made.alloc_memory_pool()
    made.init_attention_backends()
    made.init_cuda_graphs()
    return made


def graph_of(count):
    """Returns the decode step's CUDA graph for this many sequences."""
    if not new:
        return runner.graph_runner.graphs[count]
    graphs = runner.decode_cuda_graph_runner.backend._graphs
    return next(graph for key, graph in graphs.items() if key.size == count)


runner = new_runner() if new else old_runner()
method = runner.model.model.layers[0].mlp.experts.quant_method
print(
    f"{kind} {mode}: ready after {time.time() - t0:.1f} s; {type(method).__name__}, "
    f"MoE backend {args.moe_runner_backend}",
    flush=True,
)


def prompts(count, length=64):
    rng = torch.Generator().manual_seed(count)
    return torch.randint(3, 1024, (count, length), generator=rng).tolist()


def generate(count, steps, forced=None):
    """Returns (tokens [steps, count], logits [steps, count, vocab]). forced: tokens to feed instead of the model's
    own."""
    runner.req_to_token_pool.clear()
    runner.token_to_kv_pool_allocator.clear()
    reqs = bench.prepare_synthetic_inputs_for_latency_test(count, 64, prompts(count))
    token, logits, batch = bench.extend(reqs, runner)
    tokens, all_logits = [token.cpu()], [logits.float().cpu()]
    for step in range(steps - 1):
        fed = token if forced is None else forced[step].to(token.device)
        token, logits = bench.decode(fed, batch, runner)
        tokens.append(token.cpu())
        all_logits.append(logits.float().cpu())
    return torch.stack(tokens), torch.stack(all_logits), batch, token


result, lines = {}, []
with torch.no_grad():
    for count in (4, 16):
        tokens, logits, *_ = generate(count, 48)
        again, *_ = generate(count, 48)
        result[count] = {"tokens": tokens, "logits": logits}
        lines.append(
            f"{kind} {mode} batch {count}: {tokens.unique().numel()} different tokens; "
            f"twice the same: {bool((tokens == again).all())}"
        )
    with open(f"{out}/.timing", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for count in (1, 4, 16, 64):
            *_, batch, token = generate(count, 8)
            walls = []
            for _ in range(40):
                torch.cuda.synchronize()
                start = time.perf_counter()
                token, _ = bench.decode(token, batch, runner)
                torch.cuda.synchronize()
                walls.append((time.perf_counter() - start) * 1e6)
            wall, quickest = sorted(walls)[20], min(walls)
            graph = graph_of(count)
            for _ in range(5):
                graph.replay()
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            for _ in range(50):
                graph.replay()
            b.record()
            torch.cuda.synchronize()
            gpu = a.elapsed_time(b) * 1e3 / 50
            result[f"us {count}"] = gpu
            lines.append(
                f"{kind} {mode} batch {count}: decode step {gpu:.1f} us on the GPU (graph), "
                f"{wall:.0f} us (median; least {quickest:.0f}) with SGLang's Python"
            )
    print("\n".join(lines), flush=True)
    path = f"{out}/{kind}-{mode}.pt"
    torch.save(result, path + ".part")
    os.replace(path + ".part", path)
    if mode == "on":
        for _ in range(600):
            if os.path.exists(f"{out}/{kind}-off.pt"):
                break
            time.sleep(0.5)
        off = torch.load(f"{out}/{kind}-off.pt", weights_only=True)
        for count in (4, 16):
            theirs, ours = off[count]["tokens"], result[count]["tokens"]
            equal = theirs == ours
            prefix = equal.cumprod(0).sum(0)
            forced, logits, *_ = generate(count, 48, forced=theirs)
            agree = forced == theirs
            reference = off[count]["logits"]
            top = reference.topk(2).values
            margin, error = top[..., 0] - top[..., 1], (logits - reference).abs().amax(-1)
            rel = ((logits - reference).norm() / reference.norm()).item()
            print(
                f"{kind} batch {count}: greedy tokens equal {int(equal.sum())} of {equal.numel()}, "
                f"whole sequences {int((prefix == 48).sum())} of {count}; same input tokens: "
                f"{int(agree.sum())} of {agree.numel()}, logits differ by {rel:.2e} (relative norm); "
                f"where the token differs the margin is {margin[~agree].tolist()} "
                f"and the logits' largest difference {error[~agree].tolist()}",
                flush=True,
            )
        for count in (1, 4, 16, 64):
            a, b = off[f"us {count}"], result[f"us {count}"]
            print(f"{kind} batch {count}: decode step off {a:.1f} us, on {b:.1f} us: {a / b:.2f}x", flush=True)

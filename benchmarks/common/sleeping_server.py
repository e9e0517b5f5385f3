"""The server with engines that sleep (``sleeping_engine.py``); its flags are the server's and a few more."""

from __future__ import annotations

import sys

if __name__ in ("__main__", "__mp_main__"):  # the engine's process imports this module, too
    sys.modules["torch"] = None  # type: ignore[assignment]  # nothing is computed, and it would take most of the start

if __name__ == "__main__":
    import os
    from pathlib import Path

    import omniserve
    from benchmarks.common.sleeping_engine import SleepingLoader
    from omniserve.launch.flags import config_from
    from omniserve.server.cli import build_parser, options_from
    from omniserve.server.serve import run

    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # that torch is missing
    parser = build_parser()
    parser.add_argument("--sleep-model", default=SleepingLoader.model, help="a model that the simulator knows")
    parser.add_argument("--sleep-device", default=SleepingLoader.device, help="a device that the simulator knows")
    parser.add_argument("--sleep-seed", type=int, default=SleepingLoader.seed, help="seed of the noise of steps")
    parser.add_argument("--sleep-speed", type=float, default=SleepingLoader.speed, help="beside that of the device")
    parser.add_argument("--sleep-slo", type=float, nargs=2, default=[1.0, 0.1], help="TTFT and TPOT of LS, in seconds")
    args = parser.parse_args()
    tokenizer = str(Path(omniserve.__file__).with_name("builtin_model"))
    options = options_from(args, tokenizer=tokenizer, model_names=("sleeping",), config=config_from(args))
    ttft_s, tpot_s = args.sleep_slo
    loader = SleepingLoader(
        model=args.sleep_model, device=args.sleep_device, speed=args.sleep_speed, seed=args.sleep_seed,
        ttft_s=ttft_s, tpot_s=tpot_s,
    )  # fmt: skip
    sys.exit(run(options, loader))

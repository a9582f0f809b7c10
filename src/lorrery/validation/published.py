"""Paths of the published figures in the package; `data/README.md` names their sources."""

from pathlib import Path

_FOLDER = Path(__file__).parent / "data"

MEASURED_STEPS = _FOLDER / "step_time_measured.csv"
"""Steps timed on real GPUs, from three sources."""
MEASURED_KERNELS = _FOLDER / "kernel_measured_excerpt.csv"
"""Kernels timed one by one, on eleven GPUs."""
MEASURED_LORA = _FOLDER / "lora_measured.csv"
"""vLLM's LoRA kernels, timed for this project on H100 and H200."""
MEASURED_SEGMENTED_LORA = _FOLDER / "lora_segmented_measured.csv"
"""SGLang's, likewise."""
MEASURED_SERVING = _FOLDER / "serving_measured.csv"
"""Runs of models served on H100, H200, B200 and MI300X, by vLLM, SGLang and TensorRT-LLM."""
SERVED_LORA = _FOLDER / "served_lora.csv"
"""Runs with adapters that users of vLLM and SGLang published, with their commands."""
SLORA_RUNS = _FOLDER / "slora_measured.csv"
"""The runs that S-LoRA's repository publishes."""
VIDUR_REQUESTS = _FOLDER / "vidur_conv_vllm.csv"
"""A run of Vidur: its requests."""
VIDUR_STEPS = _FOLDER / "vidur_conv_vllm_steps.csv"
"""The same run's engine steps."""

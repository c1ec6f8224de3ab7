from vllm.engine import pause

TORCH: str
CUDA: str | None

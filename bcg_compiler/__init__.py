"""A torch.compile backend: CUDA graphs that break where they must and replay as one."""

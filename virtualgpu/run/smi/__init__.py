"""The program's `nvidia-smi`: `__main__` is the command, `fields` what it can be asked."""

"""What a module of transformers, PyTorch or PEFT is made of, and whose function a call of it runs; nothing here changes one."""

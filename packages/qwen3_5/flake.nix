{
  description = "Bastile: cuTile kernels for Qwen3.5";

  inputs = {
    kernel-builder.url = "github:huggingface/kernels";
  };

  # Build it in build/stage/qwen3_5, which `make stage` writes: kernel-builder sees the folder of this flake alone, and there
  # torch-ext/qwen3_5 holds what packages share too. The kernels are compiled ahead of time (make build) into torch-ext/qwen3_5/cubins, so
  # this build needs no GPU and no compiler.
  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}

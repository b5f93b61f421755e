{
  description = "Bastile: cuTile kernels for the operations of Liger-Kernel";

  inputs = {
    kernel-builder.url = "github:huggingface/kernels";
  };

  # Build it in build/stage/liger, which `make stage` writes: kernel-builder sees the folder of this flake alone, and there
  # torch-ext/liger holds what packages share too. The kernels are compiled ahead of time (make build) into torch-ext/liger/cubins, so
  # this build needs no GPU and no compiler.
  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}

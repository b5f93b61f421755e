{
  description = "Bastile: cuTile kernels for decoders with experts";

  inputs = {
    kernel-builder.url = "github:huggingface/kernels";
  };

  # Build it in build/stage/moe, which `make stage` writes: kernel-builder sees the folder of this flake alone, and there
  # torch-ext/moe holds what packages share too. The kernels are compiled ahead of time (make build) into torch-ext/moe/cubins, so
  # this build needs no GPU and no compiler.
  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}

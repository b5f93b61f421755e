{
  description = "Bastile: cuTile kernels for Qwen3";

  inputs = {
    kernel-builder.url = "github:huggingface/kernels";
  };

  # The kernels are compiled ahead of time (make build) into torch-ext/qwen3/cubins, so this build needs no GPU and no compiler.
  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}

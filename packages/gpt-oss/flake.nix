{
  description = "Bastile: cuTile kernels for GPT-OSS";

  inputs = {
    kernel-builder.url = "github:huggingface/kernels";
  };

  # The kernels are compiled ahead of time (make build) into torch-ext/gpt_oss/cubins, so this build needs no GPU and no compiler.
  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}

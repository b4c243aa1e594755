// A device guard for CUDA: with it a build of torch for CPUs makes fake tensors (without storage) on a CUDA device.
#include <c10/core/impl/DeviceGuardImplInterface.h>

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return c10::Device(c10::DeviceType::CUDA, 0); }
  c10::Device getDevice() const override { return c10::Device(c10::DeviceType::CUDA, 0); }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// A device guard for CUDA that does nothing: a CPU build of torch has none, and asks for one where tensors say cuda:0.
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>) }

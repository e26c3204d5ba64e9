// What this project knows of DLPack: the ABI of version 1 (https://dmlc.github.io/dlpack/latest/), as far
// as reading a torch.Tensor needs it. `torch.Tensor.__dlpack_c_exchange_api__` is a capsule that holds an
// ExchangeApi; reading through it needs neither torch's headers nor a link to libtorch.
#pragma once

#include <cstdint>

namespace fused_adamw::dlpack {

inline constexpr char kCapsuleName[] = "dlpack_exchange_api";
inline constexpr std::uint32_t kMajorVersion = 1;

enum DeviceType : std::int32_t { kCpu = 1, kCuda = 2 };

struct Device {
  std::int32_t type;  // DeviceType, or a value that this project does not know
  std::int32_t id;
};

enum DataTypeCode : std::uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBFloat = 4, kBool = 6 };

struct DataType {
  std::uint8_t code;  // DataTypeCode, or a value that this project does not know
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  DataType dtype;
  std::int64_t* shape;    // owned by the tensor, as are the strides
  std::int64_t* strides;  // in elements
  std::uint64_t byte_offset;
};

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

// A tensor that is kept alive until `deleter` is called.
struct ManagedTensor {
  Version version;
  void* manager_ctx;
  void (*deleter)(ManagedTensor* self);
  std::uint64_t flags;
  Tensor tensor;
};

struct ExchangeApiHeader {
  Version version;
  ExchangeApiHeader* prev_api;  // an older table, or null
};

struct ExchangeApi {
  ExchangeApiHeader header;
  void* managed_tensor_allocator;
  // A new managed tensor; -1 with a Python error set on failure.
  int (*managed_tensor_from_py_object)(void* py_object, ManagedTensor** out);
  void* managed_tensor_to_py_object;
  // Fills the tensor without owning anything; -1 with a Python error set on failure. The object must be an
  // instance of the type that the table was read from: it is not checked.
  int (*tensor_from_py_object)(void* py_object, Tensor* out);
  int (*current_work_stream)(DeviceType type, std::int32_t device_id, void** out_stream);
};

}  // namespace fused_adamw::dlpack

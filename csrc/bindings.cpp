// The module fused_adamw._C: the only file that knows pybind11 and Python objects.
//
// It checks nothing that torch_library/checks.py checks; callers run those checks first.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/adamw_step.h"
#include "cpu/float_environment.h"
#include "cpu/gradient_stats.h"
#include "cpu/instruction_set.h"
#include "cpu/parallel.h"
#include "cuda/driver.h"
#include "cuda/launch_layout.h"
#include "cuda/launches.h"
#include "cuda/uploading_module.h"
#include "dlpack_abi.h"
#include "tensor_table.h"

namespace py = pybind11;

namespace fused_adamw {
namespace {

// How torch tensors are read: set once, by initialize().
struct TorchApi {
  const dlpack::ExchangeApi* exchange = nullptr;
  PyTypeObject* tensor_type = nullptr;
  PyTypeObject* parameter_type = nullptr;
  const PyGetSetDef* grad = nullptr;  // where the attribute of this name is one that C code gets
};

TorchApi torch_api;

void initialize(const py::capsule& capsule, const py::type& tensor_type, const py::type& parameter_type) {
  const auto* api =
      static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName));
  if (api == nullptr) throw py::error_already_set();
  while (api != nullptr && api->header.version.major != dlpack::kMajorVersion) {
    api = reinterpret_cast<const dlpack::ExchangeApi*>(api->header.prev_api);
  }
  if (api == nullptr || api->tensor_from_py_object == nullptr ||
      api->managed_tensor_from_py_object == nullptr) {
    throw std::runtime_error("this torch offers no DLPack C exchange API of major version " +
                             std::to_string(dlpack::kMajorVersion));
  }
  const py::object grad = tensor_type.attr("grad");
  const bool has_getter = Py_IS_TYPE(grad.ptr(), &PyGetSetDescr_Type) != 0;
  torch_api = {api, reinterpret_cast<PyTypeObject*>(tensor_type.ptr()),
               reinterpret_cast<PyTypeObject*>(parameter_type.ptr()),
               has_getter ? reinterpret_cast<PyGetSetDescrObject*>(grad.ptr())->d_getset : nullptr};
}

// A new reference to `object` as a list or tuple, whose items can be read in place.
py::object fast_sequence(const py::handle& object) {
  auto sequence = py::reinterpret_steal<py::object>(PySequence_Fast(object.ptr(), "a list is required"));
  if (!sequence) throw py::error_already_set();
  return sequence;
}

template <typename Function>
void for_each_item(const py::handle& sequence, Function function) {
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(sequence.ptr());
  PyObject** const items = PySequence_Fast_ITEMS(sequence.ptr());
  for (Py_ssize_t i = 0; i < size; ++i) function(items[i]);
}

bool is_plain(const PyTypeObject* type) {
  return type == torch_api.tensor_type || type == torch_api.parameter_type;
}

bool only_plain_tensors(const py::sequence& lists) {
  bool plain = true;
  for (const py::handle list : lists) {
    for_each_item(fast_sequence(list), [&](PyObject* item) { plain &= is_plain(Py_TYPE(item)); });
  }
  return plain;
}

// Whether two lists hold the same objects.
bool same_objects(const py::list& found, const py::list& expected) {
  const std::size_t size = expected.size();
  if (found.size() != size) return false;
  for (std::size_t i = 0; i < size; ++i) {
    if (PyList_GET_ITEM(found.ptr(), i) != PyList_GET_ITEM(expected.ptr(), i)) return false;
  }
  return true;
}

// `tensor.grad`. Looking an attribute up takes as long as getting it.
py::object grad_of(PyObject* tensor) {
  PyObject* const grad = torch_api.grad != nullptr && is_plain(Py_TYPE(tensor))
                             ? torch_api.grad->get(tensor, torch_api.grad->closure)
                             : PyObject_GetAttrString(tensor, "grad");
  if (grad == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(grad);
}

// The gradients of the parameters that have one; nothing if params[i] has none though without_grad[i] is
// False, or the other way around.
std::optional<py::list> planned_grads(const py::list& params, const py::list& without_grad) {
  const std::size_t size = without_grad.size();
  if (params.size() != size) return std::nullopt;
  PyObject** const none_expected = PySequence_Fast_ITEMS(without_grad.ptr());
  py::list grads(std::count(none_expected, none_expected + size, Py_False));
  Py_ssize_t next = 0;
  for (std::size_t i = 0; i < size; ++i) {
    py::object grad = grad_of(PyList_GET_ITEM(params.ptr(), i));
    if (grad.is_none() != (none_expected[i] == Py_True)) return std::nullopt;
    if (!grad.is_none()) PyList_SET_ITEM(grads.ptr(), next++, grad.release().ptr());
  }
  return grads;
}

template <typename Function>
void for_each_entry(PyObject* dict, Function function) {
  Py_ssize_t position = 0;
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  while (PyDict_Next(dict, &position, &key, &value) != 0) function(key, value);
}

// Calls `function` with the objects that a dict of dicts consists of, one after another, and `count` with the
// number of entries of each dict, which tells what belongs to which.
template <typename Object, typename Count>
void for_each_part(const py::dict& dicts, Object object, Count count) {
  for_each_entry(dicts.ptr(), [&](PyObject* key, PyObject* inner) {
    object(key);
    object(inner);
    if (!PyDict_Check(inner)) return count(-1);
    count(PyDict_GET_SIZE(inner));
    for_each_entry(inner, [&](PyObject* inner_key, PyObject* value) {
      object(inner_key);
      object(value);
    });
  });
}

py::list parts_of_dicts(const py::dict& dicts) {
  py::list parts;
  for_each_part(
      dicts, [&](PyObject* object) { parts.append(py::handle(object)); },
      [&](Py_ssize_t count) { parts.append(py::int_(count)); });
  return parts;
}

bool are_parts_of_dicts(const py::dict& dicts, const py::list& parts) {
  const std::size_t size = parts.size();
  std::size_t i = 0;
  bool same = true;
  const auto next = [&] { return PyList_GET_ITEM(parts.ptr(), i++); };
  for_each_part(
      dicts, [&](PyObject* object) { same = same && i < size && next() == object; },
      [&](Py_ssize_t count) { same = same && i < size && PyLong_AsSsize_t(next()) == count; });
  return same && i == size;
}

dlpack::Tensor read_tensor(PyObject* object) {
  PyTypeObject* const type = Py_TYPE(object);
  if (!is_plain(type) &&
      (torch_api.tensor_type == nullptr || !PyType_IsSubtype(type, torch_api.tensor_type))) {
    throw py::type_error(std::string("a torch.Tensor is required, not ") + type->tp_name);
  }
  dlpack::Tensor tensor;
  if (torch_api.exchange->tensor_from_py_object(object, &tensor) != 0) throw py::error_already_set();
  // Such as torch's lazily zero tensors: nothing that torch calls a tensor may make a kernel read at null.
  if (tensor.data == nullptr &&
      std::none_of(tensor.shape, tensor.shape + tensor.ndim, [](auto size) { return size == 0; })) {
    throw py::value_error("a tensor with elements has no storage");
  }
  return tensor;
}

// Keeps tensors alive from C++, too.
//
// A tensor with one reference in C++ belongs to its Python object, one with several owns it: torch passes the
// ownership over when the second reference comes, and back when it goes. Reading a tensor and counting its
// version take such a reference each; where there is one already, they cost a third.
class HeldTensors {
 public:
  explicit HeldTensors(const py::sequence& objects) {
    held_.reserve(objects.size());
    for_each_item(fast_sequence(objects), [&](PyObject* item) {
      dlpack::ManagedTensor* tensor = nullptr;
      if (!is_plain(Py_TYPE(item))) return;
      if (torch_api.exchange->managed_tensor_from_py_object(item, &tensor) != 0) {
        PyErr_Clear();  // it is refused where it is read
      } else {
        held_.emplace_back(tensor);
      }
    });
  }

 private:
  struct Release {
    void operator()(dlpack::ManagedTensor* tensor) const {
      if (tensor->deleter != nullptr) tensor->deleter(tensor);
    }
  };

  std::vector<std::unique_ptr<dlpack::ManagedTensor, Release>> held_;
};

// Whether the storage holds the negated values, which DLPack does not tell. Such a view, the imaginary part
// of a conjugate, steps over the real parts: only with one element can its strides pass the checks.
bool is_negated(PyObject* tensor) {
  return py::reinterpret_borrow<py::object>(tensor).attr("is_neg")().cast<bool>();
}

TensorTable read_table(const std::string& op, const py::sequence& lists, const std::vector<bool>& written,
                       std::vector<std::int64_t> rounding_seeds) {
  if (lists.size() != written.size()) throw py::value_error("lists and written must have equal lengths");
  TensorTable table(op);
  for (std::size_t l = 0; l < written.size(); ++l) {
    const py::object list = fast_sequence(py::object(lists[l]));
    table.begin_list(written[l], static_cast<std::size_t>(PySequence_Fast_GET_SIZE(list.ptr())));
    for_each_item(list, [&](PyObject* item) {
      // What is written needs no look: the dispatcher refuses such views, and so does the optimizer.
      if (table.add(read_tensor(item)) == 1 && !written[l]) table.add_to_layout(is_negated(item));
    });
  }
  table.set_rounding_seeds(std::move(rounding_seeds));
  return table;
}

cpu::TensorUpdate tensor_update(const TensorTable& old, const TensorTable& updated, std::size_t i,
                                const UpdateScalars& scalars, long long number) {
  const TensorView& grad = old.tensors(kGrads)[i];
  cpu::TensorUpdate update;
  update.size = grad.size;
  update.grad_type = grad.type();
  update.weights = updated.weights();
  update.param_type = old.tensors(kParams)[i].type();
  update.param = old.pointer<void>(kParams, i);
  update.master = old.pointer<void>(kMasters, i);
  set_read_arrays(update, old, i);
  update.new_param = updated.pointer<void>(kParams, i);
  update.new_master = updated.pointer<void>(kMasters, i);
  set_written_moments(update, updated, i);
  update.scalars = scalars;
  update.update_number = static_cast<std::uint64_t>(number);
  update.rounding_seed = updated.rounding_seed(i);
  return update;
}

// As cuda_kernels.py calls the forms.
const char* name_of(WeightForm weights) {
  switch (weights) {
    case kMasterWeights:
      return "master";
    case kStochasticWeights:
      return "stochastic";
    case kSplitWeights:
      return "split";
    default:
      return "float32";
  }
}

// (table, index) of the first step counter that is no count: negative, fractional, NaN or beyond int64.
std::optional<std::tuple<std::size_t, std::size_t>> find_bad_step(
    const std::vector<const TensorTable*>& tables) {
  constexpr float kLimit = 0x1.0p63f;
  for (std::size_t t = 0; t < tables.size(); ++t) {
    const auto& steps = tables[t]->tensors(kStateSteps);
    for (std::size_t i = 0; i < steps.size(); ++i) {
      const float step = *static_cast<const float*>(steps[i].data);
      if (!(step >= 0.0f && step < kLimit && step == std::floor(step))) return std::make_tuple(t, i);
    }
  }
  return std::nullopt;
}

// The scalars in IEEE arithmetic: where subnormals are flushed, a tiny step size would become 0.
UpdateScalars ieee_update_scalars(StepOptions options, long long step) {
  const cpu::IeeeFloatEnvironment ieee;
  cpu::fence_arithmetic(options);
  UpdateScalars scalars = update_scalars(options, step);
  cpu::fence_arithmetic(scalars);
  return scalars;
}

float ieee_inverse_grad_scale(double grad_scale) {
  const cpu::IeeeFloatEnvironment ieee;
  cpu::fence_arithmetic(grad_scale);
  float inverse_scale = inverse_grad_scale(grad_scale);
  cpu::fence_arithmetic(inverse_scale);
  return inverse_scale;
}

void adamw_step_in_place(const std::vector<const TensorTable*>& tables,
                         const std::vector<StepOptions>& options, int threads) {
  std::vector<cpu::TensorUpdate> updates;
  for (std::size_t t = 0; t < tables.size(); ++t) {
    const TensorTable& table = *tables[t];
    const auto& steps = table.tensors(kStateSteps);
    long long last_step = 0;
    UpdateScalars scalars;
    updates.reserve(updates.size() + steps.size());
    for (std::size_t i = 0; i < steps.size(); ++i) {
      if (table.tensors(kParams)[i].size == 0) continue;
      float& counter = *static_cast<float*>(steps[i].data);
      const long long step = static_cast<long long>(counter) + 1;
      counter += 1.0f;
      if (step != last_step) scalars = ieee_update_scalars(options[t], step);
      last_step = step;
      updates.push_back(tensor_update(table, table, i, scalars, step));
    }
  }
  const py::gil_scoped_release release;
  cpu::adamw_step(updates, threads);
}

// Entry k is the tensor of olds[k] and updateds[k], after steps[k] complete updates.
void adamw_step(const std::vector<const TensorTable*>& olds, const std::vector<const TensorTable*>& updateds,
                const std::vector<StepOptions>& options, const std::vector<long long>& steps, int threads) {
  std::vector<cpu::TensorUpdate> updates;
  updates.reserve(olds.size());
  for (std::size_t k = 0; k < olds.size(); ++k) {
    const UpdateScalars scalars = ieee_update_scalars(options[k], steps[k] + 1);
    updates.push_back(tensor_update(*olds[k], *updateds[k], 0, scalars, steps[k] + 1));
  }
  const py::gil_scoped_release release;
  cpu::adamw_step(updates, threads);
}

StatsRow* rows_of(const TensorTable& table, std::size_t list) {
  return static_cast<StatsRow*>(table.tensors(list)[0].data);
}

void analyze(const std::vector<const TensorTable*>& tables, std::size_t list, StatsRow* rows,
             double grad_scale, int threads) {
  std::vector<cpu::Gradient> gradients;
  for (const TensorTable* table : tables) {
    gradients.reserve(gradients.size() + table->tensors(list).size());
    for (const TensorView& grad : table->tensors(list)) {
      gradients.push_back({grad.size, grad.data, grad.type()});
    }
  }
  const py::gil_scoped_release release;
  cpu::analyze_gradients(gradients, ieee_inverse_grad_scale(grad_scale), rows, threads);
}

void merge_rows(const TensorTable& table) {
  cpu::merge_rows(rows_of(table, 0), table.tensors(0)[0].size / kValuesPerRow, rows_of(table, 1));
}

// The order of the lists of both merges: rows, then what is written.
void merge_all_rows(const TensorTable& table, bool hierarchical) {
  const std::int64_t count = table.tensors(0)[0].size / kValuesPerRow;
  const py::gil_scoped_release release;
  if (hierarchical) {
    cpu::merge_all_rows_by_stages(rows_of(table, 0), count, rows_of(table, 1), rows_of(table, 2));
  } else {
    cpu::merge_all_rows_serially(rows_of(table, 0), count, rows_of(table, 2));
  }
}

cuda::Stream current_stream(int device) {
  void* stream = nullptr;
  if (device < 0) return stream;
  if (torch_api.exchange->current_work_stream(dlpack::kCuda, device, &stream) != 0)
    throw py::error_already_set();
  return stream;
}

// A number, or a tensor of one element on the device.
cuda::Scalar cuda_scalar(const py::object& value) {
  if (!PyType_IsSubtype(Py_TYPE(value.ptr()), torch_api.tensor_type)) {
    return {value.cast<double>(), nullptr, cuda::kOnHost};
  }
  const dlpack::Tensor tensor = read_tensor(value.ptr());
  const void* const pointer = static_cast<const char*>(tensor.data) + tensor.byte_offset;
  if (tensor.dtype.code == dlpack::kBool) return {0.0, pointer, cuda::kDeviceBool};
  if (tensor.dtype.code == dlpack::kInt) return {0.0, pointer, cuda::kDeviceInt64};
  return {0.0, pointer, tensor.dtype.bits == 64 ? cuda::kDeviceFloat64 : cuda::kDeviceFloat32};
}

cuda::GroupSettings cuda_group_settings(const py::object& lr, const py::object& beta1,
                                        const py::object& beta2, double weight_decay, double eps,
                                        bool maximize) {
  return {cuda_scalar(lr), cuda_scalar(beta1), cuda_scalar(beta2), weight_decay, eps, maximize};
}

cuda::StepSettings cuda_step_settings(const py::object& grad_scale, const py::object& found_inf, double clip,
                                      const py::object& report, double max_norm, double norm_epsilon) {
  const auto* const report_row =
      report.is_none() ? nullptr : static_cast<const float*>(cuda_scalar(report).pointer);
  return {cuda_scalar(grad_scale), cuda_scalar(found_inf), clip, report_row, max_norm, norm_epsilon};
}

void cuda_step_out_of_place(const cuda::Launcher& launcher, const std::vector<const TensorTable*>& olds,
                            const std::vector<const TensorTable*>& updateds,
                            const std::vector<py::object>& steps, const cuda::GroupSettings& group,
                            const cuda::StepSettings& settings) {
  std::vector<cuda::Scalar> scalars;
  scalars.reserve(steps.size());
  for (const py::object& step : steps) scalars.push_back(cuda_scalar(step));
  cuda::step_out_of_place(launcher, olds, updateds, scalars, group, settings,
                          current_stream(launcher.device()));
}

// Of a Python `with` block.
struct RelaxedCaptureScope {
  std::optional<cuda::RelaxedCapture> relaxed;
};

// `allocate` takes a number of bytes and returns a tensor.
std::unique_ptr<cuda::UploadingModule> uploading_module(int device, py::function allocate) {
  return std::make_unique<cuda::UploadingModule>(device, [allocate](std::size_t bytes) {
    const auto tensor = std::make_shared<py::object>(allocate(bytes));
    return cuda::Allocation{const_cast<void*>(cuda_scalar(*tensor).pointer), tensor};
  });
}

using Position = std::tuple<std::size_t, std::size_t, std::size_t>;

std::optional<std::tuple<Position, Position>> find_overlap_positions(
    const std::vector<const TensorTable*>& tables, bool elementwise) {
  const auto overlap = find_overlap(tables, elementwise);
  if (!overlap) return std::nullopt;
  const auto position = [](const TensorPosition& p) { return Position{p.table, p.list, p.index}; };
  return std::make_tuple(position(overlap->written), position(overlap->other));
}

std::vector<std::string> cpu_capabilities() {
  std::vector<std::string> names;
  for (const cpu::InstructionSet set : cpu::kInstructionSets) {
    if (cpu::supported(set)) names.emplace_back(cpu::name(set));
  }
  return names;
}

}  // namespace
}  // namespace fused_adamw

PYBIND11_MODULE(_C, m) {
  using namespace fused_adamw;
  m.doc() = "Kernels on storage that the caller owns; see _C.pyi.";
  m.def("initialize", &initialize, py::arg("exchange_api"), py::arg("tensor_type"),
        py::arg("parameter_type"));

  m.def("only_plain_tensors", &only_plain_tensors, py::arg("lists"));
  m.def("same_objects", &same_objects, py::arg("found"), py::arg("expected"));
  m.def("planned_grads", &planned_grads, py::arg("params"), py::arg("without_grad"));
  m.def("parts_of_dicts", &parts_of_dicts, py::arg("dicts"));
  m.def("are_parts_of_dicts", &are_parts_of_dicts, py::arg("dicts"), py::arg("parts"));

  py::class_<HeldTensors>(m, "HeldTensors").def(py::init<const py::sequence&>(), py::arg("objects"));

  m.attr("WEIGHT_FORMS") = std::array<const char*, 4>{name_of(kFloat32Weights), name_of(kMasterWeights),
                                                      name_of(kStochasticWeights), name_of(kSplitWeights)};
  py::class_<TensorTable>(m, "TensorTable")
      .def(py::init(&read_table), py::arg("op"), py::arg("lists"), py::arg("written"),
           py::arg("rounding_seeds") = std::vector<std::int64_t>())
      .def_property_readonly("weights", [](const TensorTable& self) { return name_of(self.weights()); })
      .def("layout_known", &TensorTable::layout_known)
      .def("remember_layout", &TensorTable::remember_layout)
      .def_property_readonly("device_index", [](const TensorTable& self) { return self.device().id; })
      .def("list_size", [](const TensorTable& self, std::size_t list) { return self.tensors(list).size(); })
      .def("count_rows", [](const TensorTable& self, std::size_t list) {
        std::int64_t rows = 0;
        for (const TensorView& grad : self.tensors(list)) {
          rows += (grad.size + kElementsPerRow - 1) / kElementsPerRow;
        }
        return rows;
      });

  py::class_<StepOptions>(m, "StepOptions")
      .def(py::init([](double lr, double beta1, double beta2, double weight_decay, double eps,
                       double grad_scale, double clip, bool maximize) {
             return StepOptions{lr, beta1, beta2, weight_decay, eps, grad_scale, clip, maximize};
           }),
           py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("weight_decay"), py::arg("eps"),
           py::arg("grad_scale"), py::arg("clip"), py::arg("maximize"));

  m.def("find_overlap", &find_overlap_positions, py::arg("tables"), py::arg("elementwise"));
  m.def("find_bad_step", &find_bad_step, py::arg("tables"));
  m.def("adamw_step_in_place", &adamw_step_in_place, py::arg("tables"), py::arg("options"),
        py::arg("threads"));
  m.def("adamw_step", &adamw_step, py::arg("olds"), py::arg("updateds"), py::arg("options"), py::arg("steps"),
        py::arg("threads"));

  m.attr("ELEMENTS_PER_ROW") = kElementsPerRow;
  m.attr("ROWS_PER_MERGE") = kRowsPerMerge;
  m.def(
      "analyze_gradients",
      [](const TensorTable& table, double grad_scale, int threads) {
        analyze({&table}, 0, rows_of(table, 1), grad_scale, threads);
      },
      py::arg("table"), py::arg("grad_scale"), py::arg("threads"));
  m.def(
      "analyze_and_merge",
      [](const std::vector<const TensorTable*>& tables, const TensorTable& stats, double grad_scale,
         bool hierarchical, int threads) {
        analyze(tables, kGrads, rows_of(stats, 0), grad_scale, threads);
        merge_all_rows(stats, hierarchical);
      },
      py::arg("tables"), py::arg("stats"), py::arg("grad_scale"), py::arg("hierarchical"),
      py::arg("threads"));
  m.def("merge_rows", &merge_rows, py::arg("table"));
  m.def("merge_all_rows", &merge_all_rows, py::arg("table"), py::arg("hierarchical"));
  m.def(
      "clip_coefficient",
      [](const std::array<float, 3>& report, double max_norm, double epsilon) {
        return clip_coefficient({report[0], report[1], report[2]}, max_norm, epsilon);
      },
      py::arg("report"), py::arg("max_norm"), py::arg("epsilon"));

  py::register_exception<cuda::DriverError>(m, "CudaDriverError", PyExc_RuntimeError);
  m.def("cuda_compute_capability", &cuda::compute_capability, py::arg("device"));
  m.def("cuda_driver_version", &cuda::driver_version);
  py::class_<RelaxedCaptureScope>(m, "CudaRelaxedCapture")
      .def(py::init<>())
      .def("__enter__", [](RelaxedCaptureScope& self) { self.relaxed.emplace(); })
      .def("__exit__", [](RelaxedCaptureScope& self, const py::args&) { self.relaxed.reset(); });
  py::class_<cuda::Launcher>(m, "CudaLauncher");
  py::class_<cuda::Recorder, cuda::Launcher>(m, "CudaRecorder")
      .def(py::init<unsigned>(), py::arg("resident_blocks") = 0)
      .def_property_readonly("launches", [](const cuda::Recorder& self) {
        std::vector<std::tuple<std::string, unsigned, py::bytes>> launches;
        for (const auto& launch : self.launches()) {
          launches.emplace_back(launch.kernel, launch.blocks, py::bytes(launch.parameters));
        }
        return launches;
      });
  py::class_<cuda::Module, cuda::Launcher>(m, "CudaModule")
      .def(py::init([](int device, const py::bytes& cubin, int rounds) {
             return std::make_unique<cuda::Module>(device, static_cast<std::string>(cubin), rounds);
           }),
           py::arg("device"), py::arg("cubin"), py::arg("rounds") = 0);
  py::class_<cuda::UploadingModule, cuda::Launcher>(m, "CudaUploadingModule")
      .def(py::init(&uploading_module), py::arg("device"), py::arg("allocate"))
      .def(
          "add",
          [](cuda::UploadingModule& self, const std::string& kernel, const py::bytes& cubin,
             const std::string& entry, unsigned threads, unsigned shared_bytes) {
            self.add(kernel, static_cast<std::string>(cubin), entry, threads, shared_bytes);
          },
          py::arg("kernel"), py::arg("cubin"), py::arg("entry"), py::arg("threads"), py::arg("shared_bytes"));
  m.attr("CUDA_LAYOUT") = cuda::launch_layout();
  py::class_<cuda::GroupSettings>(m, "CudaGroupSettings")
      .def(py::init(&cuda_group_settings), py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
           py::arg("weight_decay"), py::arg("eps"), py::arg("maximize"));
  py::class_<cuda::StepSettings>(m, "CudaStepSettings")
      .def(py::init(&cuda_step_settings), py::arg("grad_scale"), py::arg("found_inf"), py::arg("clip"),
           py::arg("report"), py::arg("max_norm"), py::arg("norm_epsilon"));
  m.def(
      "cuda_step_in_place",
      [](const cuda::Launcher& launcher, const std::vector<const TensorTable*>& tables,
         const std::vector<cuda::GroupSettings>& groups, const cuda::StepSettings& settings,
         bool after_analysis) {
        cuda::step_in_place(launcher, tables, groups, settings, current_stream(launcher.device()),
                            after_analysis ? cuda::Start::kOverlapping : cuda::Start::kAfterPrevious);
      },
      py::arg("launcher"), py::arg("tables"), py::arg("groups"), py::arg("settings"),
      py::arg("after_analysis") = false);
  m.def("cuda_step_out_of_place", &cuda_step_out_of_place, py::arg("launcher"), py::arg("olds"),
        py::arg("updateds"), py::arg("steps"), py::arg("group"), py::arg("settings"));
  m.def(
      "cuda_analyze_gradients",
      [](const cuda::Launcher& launcher, const TensorTable& table, const py::object& grad_scale) {
        cuda::analyze_gradients(launcher, table, cuda_scalar(grad_scale), current_stream(launcher.device()));
      },
      py::arg("launcher"), py::arg("table"), py::arg("grad_scale"));
  m.def(
      "cuda_analyze_and_merge",
      [](const cuda::Launcher& analysis, const cuda::Launcher& merge,
         const std::vector<const TensorTable*>& tables, const TensorTable& stats,
         const py::object& grad_scale, bool hierarchical) {
        cuda::analyze_and_merge(analysis, merge, tables, stats, cuda_scalar(grad_scale), hierarchical,
                                current_stream(analysis.device()));
      },
      py::arg("analysis"), py::arg("merge"), py::arg("tables"), py::arg("stats"), py::arg("grad_scale"),
      py::arg("hierarchical"));
  m.def(
      "cuda_merge_rows",
      [](const cuda::Launcher& launcher, const TensorTable& table) {
        cuda::merge_rows(launcher, table, current_stream(launcher.device()));
      },
      py::arg("launcher"), py::arg("table"));
  m.def(
      "cuda_merge_all_rows",
      [](const cuda::Launcher& launcher, const TensorTable& table, bool hierarchical) {
        cuda::merge_all_rows(launcher, table, hierarchical, current_stream(launcher.device()));
      },
      py::arg("launcher"), py::arg("table"), py::arg("hierarchical"));

  m.def("has_openmp_runtime", &cpu::has_openmp_runtime);
  m.def("cpu_capabilities", &cpu_capabilities);
  m.def("cpu_capability", [] { return std::string(cpu::name(cpu::selected_instruction_set())); });
  m.def("set_cpu_capability", &cpu::select_instruction_set, py::arg("name"));
}

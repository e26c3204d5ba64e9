#include "launches.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <memory>

#include "../gradient_stats.h"

namespace fused_adamw::cuda {
namespace {

// Whether four elements at once can be accessed.
bool allows_four(const TensorView& tensor) {
  // A power of 2, so that no division is needed: there are thousands of these.
  const std::uintptr_t bytes = kElementsPerThread * tensor.dtype.bits / 8;
  return (reinterpret_cast<std::uintptr_t>(tensor.data) & (bytes - 1)) == 0;
}

TensorShape shape_of(const TensorView& grad) {
  TensorShape shape = {};
  shape.size = grad.size;
  shape.grad = grad.type();
  shape.vectorised = allows_four(grad);
  return shape;
}

// Of a step, all of whose arrays are in these tables.
TensorShape step_shape(std::initializer_list<const TensorTable*> tables, const TensorView& grad,
                       std::size_t i) {
  TensorShape shape = shape_of(grad);
  for (const TensorTable* table : tables) {
    for (const StepList list : {kParams, kMasters, kExpAvgs, kExpAvgSqs, kMaxExpAvgSqs}) {
      const auto& tensors = table->tensors(list);
      if (!tensors.empty()) shape.vectorised &= allows_four(tensors[i]);
    }
  }
  return shape;
}

unsigned blocks_of(long long size, long long per_block) {
  return static_cast<unsigned>((size + per_block - 1) / per_block);
}

// Of a step whose blocks work on so many rounds.
unsigned step_blocks_of(long long size, int rounds) {
  // In two steps, so that only what fits 32 bits is divided by what is no constant.
  return (blocks_of(size, kElementsPerRound) + rounds - 1) / static_cast<unsigned>(rounds);
}

// Empties an index, so that tensors can be added.
template <int kCapacity>
void clear(BlockIndex<kCapacity>& index) {
  index.tensors = 0;
  std::fill(std::begin(index.first_of_run), std::end(index.first_of_run), kNoBlock);
  std::fill(std::begin(index.first), std::end(index.first), kNoBlock);
}

// Adds a tensor whose first block is this one; returns its place.
template <int kCapacity>
int add(BlockIndex<kCapacity>& index, unsigned first_block) {
  const int place = index.tensors++;
  index.first[place] = first_block;
  if (place % kIndexRun == 0) index.first_of_run[place / kIndexRun] = first_block;
  return place;
}

bool same(const Scalar& a, const Scalar& b) {
  return a.code == b.code && a.value == b.value && a.pointer == b.pointer;
}

bool same(const GroupSettings& a, const GroupSettings& b) {
  return same(a.lr, b.lr) && same(a.beta1, b.beta1) && same(a.beta2, b.beta2) &&
         a.weight_decay == b.weight_decay && a.eps == b.eps && a.maximize == b.maximize;
}

// Whether elements take much work and few bytes.
bool is_laborious(const TensorTable& table) {
  const WeightForm form = table.weights();
  return table.tensors(kMaxExpAvgSqs).empty() && (form == kSplitWeights || form == kStochasticWeights);
}

// How many rounds a block of a step is to work on, one after another. One is best for the memory: the blocks
// that run at once then work on neighbours. But a block has to form its scalars first. So few elements in
// many tensors are best left to as many blocks as run at once; and where elements take much work, a block is
// to have two rounds for its scalars. (benchmarks/launch_shapes.py)
// `updated`: one of the tables that are written.
int rounds_of(const Launcher& launcher, const std::vector<const TensorTable*>& tables,
              const TensorTable& updated) {
  if (launcher.fixed_rounds() != 0) return launcher.fixed_rounds();
  for (const int rounds : {1, 2, 4}) {
    unsigned long long blocks = 0;
    for (const TensorTable* table : tables) {
      for (const TensorView& grad : table->tensors(kGrads)) {
        blocks += step_blocks_of(grad.size, rounds);
      }
    }
    if (blocks <= launcher.resident_blocks()) return rounds;
  }
  return is_laborious(updated) ? 2 : 1;
}

// Collects tensors into parameters and launches whenever they are full.
template <typename Tensor>
class StepBatch {
 public:
  // `start` is that of the first launch; the others begin after it.
  StepBatch(const Launcher& launcher, const StepSettings& settings, int rounds, Stream stream, Start start)
      : launcher_(launcher), stream_(stream), start_(start), parameters_(new StepParameters<Tensor>) {
    parameters_->settings = settings;
    parameters_->rounds = rounds;
    begin_launch();
  }

  // `group` of the tensor before costs no search.
  void add(Tensor tensor, const GroupSettings& group) {
    if (tensor.shape.size == 0) return;
    if (parameters_->index.tensors == kMaxTensors<Tensor>) flush();
    if (groups_ == 0 || !same(parameters_->groups[group_], group)) group_ = place_of(group);
    tensor.shape.group = static_cast<unsigned short>(group_);
    parameters_->tensors[cuda::add(parameters_->index, blocks_)] = tensor;
    blocks_ += step_blocks_of(tensor.shape.size, parameters_->rounds);
  }

  void flush() {
    const int tensors = parameters_->index.tensors;
    if (tensors == 0) return;
    parameters_->slot = launcher_.next_slots(stream_, (1 + kWays) * slots_per_way(tensors));
    launcher_.launch("adamw_step", blocks_, kThreads, stream_, parameters_.get(), sizeof(*parameters_),
                     start_);
    start_ = Start::kAfterPrevious;
    begin_launch();
  }

 private:
  void begin_launch() {
    clear(parameters_->index);
    blocks_ = 0;
    groups_ = 0;
  }

  int place_of(const GroupSettings& group) {
    for (int i = 0; i < groups_; ++i) {
      if (same(parameters_->groups[i], group)) return i;
    }
    if (groups_ == kMaxGroups) flush();
    parameters_->groups[groups_] = group;
    return groups_++;
  }

  const Launcher& launcher_;
  Stream stream_;
  Start start_;
  unsigned blocks_ = 0;
  int groups_ = 0;
  int group_ = 0;
  std::unique_ptr<StepParameters<Tensor>> parameters_;  // 32 KB
};

// What the formula updates: parameters, or what makes master weights of them.
StepList updated_list(const TensorTable& table) {
  return table.weights() == kFloat32Weights ? kParams : kMasters;
}

void set_rounded(InPlaceTensor&, const TensorTable&, const TensorTable&, std::size_t) {}
void set_rounded(OutOfPlaceTensor&, const TensorTable&, const TensorTable&, std::size_t) {}

template <typename MasterTensor>
void set_rounded(MasterTensor& tensor, const TensorTable& old, const TensorTable& updated, std::size_t i) {
  tensor.rounded = {old.pointer<void>(kParams, i), updated.pointer<void>(kParams, i),
                    updated.rounding_seed(i), old.tensors(kParams)[i].type()};
}

template <typename Tensor>
void update_in_place(const Launcher& launcher, const std::vector<const TensorTable*>& tables,
                     const std::vector<GroupSettings>& groups, const StepSettings& settings, Stream stream,
                     Start start) {
  StepBatch<Tensor> batch(launcher, settings, rounds_of(launcher, tables, *tables[0]), stream, start);
  for (std::size_t t = 0; t < tables.size(); ++t) {
    const TensorTable& table = *tables[t];
    const StepList updated = updated_list(table);
    for (std::size_t i = 0; i < table.tensors(kParams).size(); ++i) {
      Tensor tensor;
      tensor.param = table.pointer<float>(updated, i);
      set_read_arrays(tensor, table, i);
      tensor.step = table.pointer<float>(kStateSteps, i);
      tensor.shape = step_shape({&table}, table.tensors(kGrads)[i], i);
      set_rounded(tensor, table, table, i);
      batch.add(tensor, groups[t]);
    }
  }
  batch.flush();
}

template <typename Tensor>
void update_out_of_place(const Launcher& launcher, const std::vector<const TensorTable*>& olds,
                         const std::vector<const TensorTable*>& updateds, const std::vector<Scalar>& steps,
                         const GroupSettings& group, const StepSettings& settings, Stream stream) {
  StepBatch<Tensor> batch(launcher, settings, rounds_of(launcher, olds, *updateds[0]), stream,
                          Start::kAfterPrevious);
  const StepList updated = updated_list(*updateds[0]);
  for (std::size_t k = 0; k < olds.size(); ++k) {
    Tensor tensor;
    tensor.param = olds[k]->pointer<float>(updated, 0);
    set_read_arrays(tensor, *olds[k], 0);
    tensor.new_param = updateds[k]->pointer<float>(updated, 0);
    set_written_moments(tensor, *updateds[k], 0);
    tensor.step = steps[k];
    tensor.shape = step_shape({olds[k], updateds[k]}, olds[k]->tensors(kGrads)[0], 0);
    set_rounded(tensor, *olds[k], *updateds[k], 0);
    batch.add(tensor, group);
  }
  batch.flush();
}

// Lists: [rows], [scratch], [report].
void launch_merge(const Launcher& launcher, const TensorTable& table, bool hierarchical, Stream stream,
                  Start start) {
  const TensorView& rows = table.tensors(0)[0];
  MergeParameters parameters = {};
  parameters.rows = static_cast<const float*>(rows.data);
  parameters.scratch = static_cast<float*>(table.tensors(1)[0].data);
  parameters.report = static_cast<float*>(table.tensors(2)[0].data);
  parameters.count = rows.size / kValuesPerRow;
  const bool serial = !hierarchical || parameters.count == 0;
  if (!serial) parameters.slot = launcher.next_slots(stream, 1);
  launcher.launch(serial ? "merge_all_rows_serially" : "merge_all_rows",
                  serial ? 1 : blocks_of(parameters.count, kRowsPerMerge), serial ? 1 : kThreads, stream,
                  &parameters, sizeof(parameters), start);
}

void launch_analysis(const Launcher& launcher, const std::vector<const std::vector<TensorView>*>& gradients,
                     const Scalar& grad_scale, float* rows, Stream stream) {
  const std::unique_ptr<AnalyzeParameters> parameters(new AnalyzeParameters);
  parameters->grad_scale = grad_scale;
  parameters->rows = rows;
  clear(parameters->index);
  unsigned blocks = 0;
  const auto flush = [&] {
    if (parameters->index.tensors == 0) return;
    launcher.launch("analyze_gradients", blocks, kThreads, stream, parameters.get(), sizeof(*parameters));
    parameters->rows += kValuesPerRow * blocks;
    clear(parameters->index);
    blocks = 0;
  };
  for (const std::vector<TensorView>* list : gradients) {
    for (const TensorView& grad : *list) {
      if (grad.size == 0) continue;
      if (parameters->index.tensors == kMaxGradients) flush();
      parameters->gradients[add(parameters->index, blocks)] = {grad.data, shape_of(grad)};
      blocks += blocks_of(grad.size, kElementsPerRow);
    }
  }
  flush();
}

}  // namespace

void step_in_place(const Launcher& launcher, const std::vector<const TensorTable*>& tables,
                   const std::vector<GroupSettings>& groups, const StepSettings& settings, Stream stream,
                   Start start) {
  if (tables[0]->weights() == kFloat32Weights) {
    update_in_place<InPlaceTensor>(launcher, tables, groups, settings, stream, start);
  } else {
    update_in_place<InPlaceMasterTensor>(launcher, tables, groups, settings, stream, start);
  }
}

void step_out_of_place(const Launcher& launcher, const std::vector<const TensorTable*>& olds,
                       const std::vector<const TensorTable*>& updateds, const std::vector<Scalar>& steps,
                       const GroupSettings& group, const StepSettings& settings, Stream stream) {
  if (updateds[0]->weights() == kFloat32Weights) {
    update_out_of_place<OutOfPlaceTensor>(launcher, olds, updateds, steps, group, settings, stream);
  } else {
    update_out_of_place<OutOfPlaceMasterTensor>(launcher, olds, updateds, steps, group, settings, stream);
  }
}

void analyze_gradients(const Launcher& launcher, const TensorTable& table, const Scalar& grad_scale,
                       Stream stream) {
  auto* const rows = static_cast<float*>(table.tensors(1)[0].data);
  launch_analysis(launcher, {&table.tensors(0)}, grad_scale, rows, stream);
}

void analyze_and_merge(const Launcher& analysis, const Launcher& merge,
                       const std::vector<const TensorTable*>& tables, const TensorTable& stats,
                       const Scalar& grad_scale, bool hierarchical, Stream stream) {
  std::vector<const std::vector<TensorView>*> gradients;
  for (const TensorTable* table : tables) gradients.push_back(&table->tensors(kGrads));
  launch_analysis(analysis, gradients, grad_scale, static_cast<float*>(stats.tensors(0)[0].data), stream);
  launch_merge(merge, stats, hierarchical, stream, Start::kOverlapping);
}

void merge_rows(const Launcher& launcher, const TensorTable& table, Stream stream) {
  const TensorView& rows = table.tensors(0)[0];
  MergeParameters parameters = {};
  parameters.rows = static_cast<const float*>(rows.data);
  parameters.report = static_cast<float*>(table.tensors(1)[0].data);
  parameters.count = rows.size / kValuesPerRow;
  if (parameters.count == 0) return;
  launcher.launch("merge_rows", blocks_of(parameters.count, kRowsPerMerge), kThreads, stream, &parameters,
                  sizeof(parameters));
}

void merge_all_rows(const Launcher& launcher, const TensorTable& table, bool hierarchical, Stream stream) {
  launch_merge(launcher, table, hierarchical, stream, Start::kAfterPrevious);
}

}  // namespace fused_adamw::cuda

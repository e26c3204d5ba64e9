// From tables of tensors to launches: fills the parameters of the kernels, in as many launches as the tables
// need.
#pragma once

#include <vector>

#include "../tensor_table.h"
#include "launch_parameters.h"
#include "launcher.h"

namespace fused_adamw::cuda {

// The lists of a step's table, in this order; see bindings.cpp.
// In place: params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, masters. groups[t] holds the
// options of tables[t]; all tables have maxima, or none, and keep their weights in one form. Overlapping:
// after analyze_and_merge on the same stream.
void step_in_place(const Launcher& launcher, const std::vector<const TensorTable*>& tables,
                   const std::vector<GroupSettings>& groups, const StepSettings& settings, Stream stream,
                   Start start);

// Entry k is the one tensor of olds[k] and updateds[k] (params, grads, exp_avgs, ...), after steps[k]
// updates.
void step_out_of_place(const Launcher& launcher, const std::vector<const TensorTable*>& olds,
                       const std::vector<const TensorTable*>& updateds, const std::vector<Scalar>& steps,
                       const GroupSettings& group, const StepSettings& settings, Stream stream);

// Lists: gradients, [rows].
void analyze_gradients(const Launcher& launcher, const TensorTable& table, const Scalar& grad_scale,
                       Stream stream);

// The gradients of a step's tables into rows, and these into a report; lists of `stats`: [rows], [scratch],
// [report].
void analyze_and_merge(const Launcher& analysis, const Launcher& merge,
                       const std::vector<const TensorTable*>& tables, const TensorTable& stats,
                       const Scalar& grad_scale, bool hierarchical, Stream stream);

// Lists: [rows], [merged].
void merge_rows(const Launcher& launcher, const TensorTable& table, Stream stream);

// Lists: [rows], [scratch], [report].
void merge_all_rows(const Launcher& launcher, const TensorTable& table, bool hierarchical, Stream stream);

}  // namespace fused_adamw::cuda

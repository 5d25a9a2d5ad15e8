// The Python face of the extension. Types are checked here, values in the classes; the GIL is released around loading,
// tokenizing and computing.
#include "kernel_probe.h"
#include "native_guard.h"
#include "sampler.h"
#include "self_test.h"
#include "skippy_pin.h"
#include "stage_context.h"
#include "stage_model.h"
#include "virtual_bindings.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <tuple>

namespace nb = nanobind;
using namespace nb::literals;

namespace skippy {
namespace {

using Tokens = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ExtentTuple = std::tuple<std::string, int, uint64_t, uint32_t, uint64_t>;
using RowsTuple = std::tuple<int, int, int>;
using SpecTuple = std::tuple<std::string, int, std::string, uint64_t, uint64_t>;

template <typename T> nb::object owned_array(std::unique_ptr<T[]> data, size_t n) {
    T *values = data.release();
    const nb::capsule owner(values, [](void *p) noexcept { delete[] static_cast<T *>(p); });
    return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(values, {n}, owner));
}

template <typename T> nb::object array_of(const T *values, size_t n) {
    std::unique_ptr<T[]> copy(new T[n]);
    std::memcpy(copy.get(), values, n * sizeof(T));
    return owned_array(std::move(copy), n);
}

ggml_type type_named(const std::string &name) {
    for (int type = 0; type < GGML_TYPE_COUNT; ++type) {
        if (name == ggml_type_name(static_cast<ggml_type>(type))) {
            return static_cast<ggml_type>(type);
        }
    }
    throw std::invalid_argument("tensor type '" + name + "' does not exist");
}

std::vector<SpecTuple> specs(const std::vector<CrossingSpec> &list) {
    std::vector<SpecTuple> tuples;
    for (const CrossingSpec &spec : list) {
        tuples.emplace_back(spec.key.first, spec.key.second, ggml_type_name(spec.type), spec.row_bytes,
                            spec.fixed_bytes);
    }
    return tuples;
}

std::vector<LaneRows> lane_rows(const std::vector<RowsTuple> &tuples) {
    std::vector<LaneRows> rows;
    for (const auto &[lane, position, n_rows] : tuples) {
        rows.push_back({lane, position, n_rows});
    }
    return rows;
}

void open_model(StageModel *self, const std::tuple<int, int, int, int> &layers,
                const std::vector<ExtentTuple> &extent_tuples, const std::vector<std::string> &files,
                const nb::object &progress, const nb::object &check, ModelOptions options) {
    std::vector<Extent> extents;
    extents.reserve(extent_tuples.size());
    for (const auto &[tensor, type, nbytes, file, offset] : extent_tuples) {
        if (type < 0 || type >= GGML_TYPE_COUNT) {
            throw std::invalid_argument("tensor '" + tensor + "' has the unknown type " + std::to_string(type));
        }
        extents.push_back({tensor, static_cast<ggml_type>(type), nbytes, file, offset, false});
    }
    const auto &[begin, end, n_layers, n_blocks] = layers;
    std::optional<nb::python_error> interrupted;
    const auto went_well = [&](const auto &call) {
        const nb::gil_scoped_acquire gil;
        try {
            call();
            if (PyErr_CheckSignals() != 0) {
                throw nb::python_error();
            }
            return true;
        } catch (nb::python_error &error) {
            interrupted.emplace(std::move(error));
            return false;
        }
    };
    WeightFiles::Progress report;
    if (!progress.is_none()) {
        report = [&](float done) { return went_well([&] { progress(done); }); };
    }
    WeightFiles::Check may_read;
    if (!check.is_none()) {
        may_read = [&] { return went_well([&] { check(); }); };
    }
    try {
        const nb::gil_scoped_release no_gil;
        new (self) StageModel({begin, end, n_layers, n_blocks}, std::move(extents), files, std::move(options), report,
                              may_read);
    } catch (const std::exception &) {
        if (interrupted) {
            throw nb::python_error(std::move(*interrupted));
        }
        throw;
    }
}

nb::list run(StageContext &self, const std::vector<RowsTuple> &rows, const Tokens &tokens,
             const std::vector<int32_t> &outputs, const nb::sequence &arriving) {
    std::vector<nb::object> alive; // the frames that the arriving tensors point into
    std::vector<MicroBatchTensor> tensors;
    for (nb::handle item : arriving) {
        auto [micro_batch, name, occurrence, type, shape, data] =
            nb::cast<std::tuple<int, std::string, int, std::string, std::vector<int64_t>, nb::object>>(item);
        const auto bytes = nb::cast<Bytes>(data, false);
        if (shape.empty() || shape.size() > GGML_MAX_DIMS) {
            throw std::invalid_argument("tensor '" + name + "': wanted 1 to 4 dimensions");
        }
        MicroBatchTensor tensor{
            micro_batch, {{name, occurrence}, type_named(type), {1, 1, 1, 1}, bytes.size()}, bytes.data(), nullptr};
        std::copy(shape.begin(), shape.end(), tensor.info.shape.begin());
        tensors.push_back(std::move(tensor));
        alive.push_back(std::move(data));
    }
    const std::vector<int32_t> ids(tokens.data(), tokens.data() + tokens.size());
    const std::vector<LaneRows> entries = lane_rows(rows);
    std::vector<MicroBatchTensor> leaving;
    {
        const nb::gil_scoped_release no_gil;
        leaving = self.run(entries, ids, outputs, std::move(tensors));
    }
    nb::list result;
    for (MicroBatchTensor &tensor : leaving) {
        const Shape &shape = tensor.info.shape;
        result.append(nb::make_tuple(tensor.micro_batch, tensor.info.key.first, tensor.info.key.second,
                                     ggml_type_name(tensor.info.type),
                                     nb::make_tuple(shape[0], shape[1], shape[2], shape[3]),
                                     owned_array(std::move(tensor.bytes), tensor.info.nbytes)));
    }
    return result;
}

void bind_model(nb::module_ &m) {
    nb::class_<StageModel>(m, "StageModel")
        .def(
            "__init__",
            [](StageModel *self, const std::tuple<int, int, int, int> &layers, const std::vector<ExtentTuple> &extents,
               const std::vector<std::string> &files, const nb::object &progress, const nb::object &check,
               std::vector<std::string> devices, int n_gpu_layers, int main_gpu, std::string split_mode,
               std::vector<float> tensor_split, bool mmap, bool mlock, bool direct_io, bool repack, bool check_tensors,
               bool no_host_buffer) {
                open_model(self, layers, extents, files, progress, check,
                           {std::move(devices), n_gpu_layers, main_gpu, std::move(split_mode), std::move(tensor_split),
                            mmap, mlock, direct_io, repack, check_tensors, no_host_buffer});
            },
            "layers"_a, "extents"_a, "files"_a, "progress"_a.none(), "check"_a.none() = nb::none(), nb::kw_only(),
            "devices"_a, "n_gpu_layers"_a, "main_gpu"_a, "split_mode"_a, "tensor_split"_a, "mmap"_a, "mlock"_a,
            "direct_io"_a, "repack"_a, "check_tensors"_a, "no_host_buffer"_a,
            "Open layers (start, end, layers run, blocks stored) of a GGUF file or of its shards, whose tensors are "
            "given as "
            "(name, type, bytes, file index, offset). check: called before the first weight is read.")
        .def_prop_ro("device_names", [](const StageModel &self) { return self.device_names(); })
        .def_prop_ro("own_bytes", &StageModel::own_bytes, "Bytes of the weights of this stage.")
        .def_prop_ro("n_vocab", [](const StageModel &self) { return llama_vocab_n_tokens(self.vocab()); })
        .def_prop_ro("n_ctx_train", [](const StageModel &self) { return llama_model_n_ctx_train(self.model()); })
        .def_prop_ro("bos", [](const StageModel &self) { return llama_vocab_bos(self.vocab()); })
        .def_prop_ro("eos", [](const StageModel &self) { return llama_vocab_eos(self.vocab()); })
        .def_prop_ro("eot", [](const StageModel &self) { return llama_vocab_eot(self.vocab()); })
        .def_prop_ro("adds_bos", [](const StageModel &self) { return llama_vocab_get_add_bos(self.vocab()); })
        .def_prop_ro("adds_eos", [](const StageModel &self) { return llama_vocab_get_add_eos(self.vocab()); })
        .def_prop_ro("description",
                     [](const StageModel &self) {
                         char text[256];
                         llama_model_desc(self.model(), text, sizeof(text));
                         return std::string(text);
                     })
        .def(
            "is_eog",
            [](const StageModel &self, int32_t token) {
                return token >= 0 && token < llama_vocab_n_tokens(self.vocab()) &&
                       llama_vocab_is_eog(self.vocab(), token);
            },
            "token"_a)
        .def(
            "tokenize",
            [](const StageModel &self, const nb::bytes &text, bool add_special, bool parse_special) {
                const std::string utf8(text.c_str(), text.size());
                std::vector<int32_t> tokens;
                {
                    const nb::gil_scoped_release no_gil;
                    tokens = self.tokenize(utf8, add_special, parse_special);
                }
                return array_of(tokens.data(), tokens.size());
            },
            "text"_a, "add_special"_a, "parse_special"_a,
            nb::sig("def tokenize(self, text: bytes, add_special: bool, parse_special: bool) -> "
                    "numpy.typing.NDArray[numpy.int32]"))
        .def(
            "piece",
            [](const StageModel &self, int32_t token, bool special) {
                const std::string bytes = self.piece(token, special);
                return nb::bytes(bytes.data(), bytes.size());
            },
            "token"_a, "special"_a)
        .def("chat_template", [](const StageModel &self) {
            const char *text = llama_model_chat_template(self.model(), nullptr);
            return std::string(text != nullptr ? text : "");
        });
}

void bind_context(nb::module_ &m) {
    nb::class_<StageContext>(m, "StageContext")
        .def(
            "__init__",
            [](StageContext *self, StageModel &model, int n_ctx, int lanes, int n_batch, int n_ubatch, int threads,
               int threads_batch, std::string cache_type_k, std::string cache_type_v, int flash_attn, bool swa_full,
               bool kv_offload, bool op_offload, int max_outputs) {
                const nb::gil_scoped_release no_gil;
                new (self) StageContext(model, {n_ctx, lanes, n_batch, n_ubatch, threads, threads_batch,
                                                std::move(cache_type_k), std::move(cache_type_v), flash_attn, swa_full,
                                                kv_offload, op_offload, max_outputs});
            },
            nb::keep_alive<1, 2>(), "model"_a, nb::kw_only(), "n_ctx"_a, "lanes"_a, "n_batch"_a, "n_ubatch"_a,
            "threads"_a, "threads_batch"_a, "cache_type_k"_a, "cache_type_v"_a, "flash_attn"_a, "swa_full"_a,
            "kv_offload"_a, "op_offload"_a, "max_outputs"_a)
        .def_prop_ro("n_ctx", &StageContext::n_ctx)
        .def_prop_ro("n_batch", &StageContext::n_batch)
        .def_prop_ro("n_ubatch", &StageContext::n_ubatch)
        .def_prop_ro("lanes", [](const StageContext &self) { return self.options().lanes; })
        .def_prop_ro("threads", [](const StageContext &self) { return llama_n_threads(self.handle()); })
        .def_prop_ro("threads_batch", [](const StageContext &self) { return llama_n_threads_batch(self.handle()); })
        .def_prop_ro("can_trim", &StageContext::can_trim)
        .def_prop_ro("wanted", [](const StageContext &self) { return specs(self.wanted()); })
        .def_prop_ro("offered", [](const StageContext &self) { return specs(self.offered()); })
        .def("serve", &StageContext::serve, "keys"_a)
        .def("trim", &StageContext::trim, "lane"_a, "position"_a)
        .def(
            "position",
            [](const StageContext &self, int lane) {
                if (lane < 0 || lane >= self.options().lanes) {
                    throw std::invalid_argument("lane " + std::to_string(lane) + " does not exist");
                }
                return self.position(lane);
            },
            "lane"_a)
        .def(
            "micro_batches",
            [](const StageContext &self, const std::vector<RowsTuple> &rows) {
                std::vector<std::tuple<int, int>> result;
                for (const MicroBatch &batch : self.micro_batches(lane_rows(rows))) {
                    result.emplace_back(batch.first_row, batch.n_rows);
                }
                return result;
            },
            "rows"_a)
        .def("run", &run, "rows"_a, "tokens"_a.noconvert(), "outputs"_a, "arriving"_a,
             nb::sig("def run(self, rows: Sequence[tuple[int, int, int]], tokens: NDArray[numpy.int32], outputs: "
                     "Sequence[int], "
                     "arriving: Sequence[tuple[int, str, int, str, Sequence[int], object]]) -> "
                     "list[tuple[int, str, int, str, tuple[int, int, int, int], NDArray[numpy.uint8]]]"))
        .def(
            "logits",
            [](const StageContext &self, int row) {
                return array_of(self.logits(row), static_cast<size_t>(llama_vocab_n_tokens(self.model().vocab())));
            },
            "row"_a, nb::sig("def logits(self, row: int) -> numpy.typing.NDArray[numpy.float32]"))
        .def(
            "pretend",
            [](StageContext &self, int lane, int n_rows) {
                const nb::gil_scoped_release no_gil;
                self.pretend({lane, self.position(lane), n_rows});
            },
            "lane"_a, "n_rows"_a, "Let a lane hold more tokens, with made-up contents.")
        .def(
            "trial",
            [](StageContext &self, int first_lane, int n_lanes) {
                std::vector<RowBits> rows;
                {
                    const nb::gil_scoped_release no_gil;
                    rows = self.trial(first_lane, n_lanes);
                }
                nb::list result;
                for (const RowBits &row : rows) {
                    nb::dict bits;
                    for (const auto &[key, bytes] : row) {
                        bits[nb::make_tuple(key.first, key.second)] = nb::bytes(bytes.data(), bytes.size());
                    }
                    result.append(std::move(bits));
                }
                return result;
            },
            nb::sig("def trial(self, first_lane: int, n_lanes: int) -> list[dict[tuple[str, int], bytes]]"),
            "first_lane"_a, "n_lanes"_a, "Run a row on each of some neighbouring lanes; the bits of each.")
        .def("forget_trials", &StageContext::forget_trials, nb::call_guard<nb::gil_scoped_release>(),
             "Empty every lane and leave no trace of trials.")
        .def("warm", &StageContext::warm, "limit"_a, "n_bytes"_a,
             "Load the next n_bytes of the first limit bytes of the weights into the processor's cache.")
        .def_prop_ro("warmable_bytes", &StageContext::warmable_bytes)
        .def_prop_ro("kv_refusal", [](const StageContext &self) { return self.pages().refusal(); })
        .def_prop_ro("kv_rope_factors", [](const StageContext &self) { return self.pages().rope_factors(); })
        .def_prop_ro(
            "kv_layers",
            [](const StageContext &self) {
                std::vector<std::tuple<int, std::string, std::string, uint64_t, uint64_t, bool>> layers;
                for (const KvLayerRows &rows : self.pages().layers()) {
                    layers.emplace_back(rows.layer, ggml_type_name(rows.k_type), ggml_type_name(rows.v_type),
                                        rows.k_row_bytes, rows.v_row_bytes, rows.v_transposed);
                }
                return layers;
            },
            "(layer, K type, V type, bytes of K, bytes of V of a token, whether V is transposed) of own layers.")
        .def(
            "export_kv",
            [](const StageContext &self, int lane, int first, int end) {
                std::unique_ptr<uint8_t[]> payload;
                {
                    const nb::gil_scoped_release no_gil;
                    payload = self.export_kv(lane, first, end);
                }
                const auto n = static_cast<size_t>(end - first);
                return owned_array(std::move(payload), n * self.pages().token_bytes());
            },
            "lane"_a, "first"_a, "end"_a,
            nb::sig("def export_kv(self, lane: int, first: int, end: int) -> NDArray[numpy.uint8]"))
        .def(
            "import_kv",
            [](StageContext &self, int lane, const std::vector<std::pair<Bytes, int>> &pages) {
                std::vector<KvPayload> payloads;
                for (const auto &[bytes, n_tokens] : pages) {
                    payloads.push_back({bytes.data(), bytes.size(), n_tokens});
                }
                const nb::gil_scoped_release no_gil;
                self.import_kv(lane, payloads);
            },
            "lane"_a, "pages"_a,
            nb::sig("def import_kv(self, lane: int, pages: Sequence[tuple[NDArray[numpy.uint8], int]]) -> None"),
            "Let a lane hold the tokens of (payload, number of tokens), one behind the other, and nothing else.")
        .def("memory", [](const StageContext &self) {
            const StageContext::Memory memory = self.memory();
            return std::make_tuple(memory.weights, memory.kv, memory.compute);
        });
}

} // namespace
} // namespace skippy

NB_MODULE(_native, m) {
    m.doc() = "Stages of a model, run by llama.cpp.";
    skippy::install_callbacks();
    llama_backend_init();
    skippy::self_test();
    m.attr("LLAMA_CPP_VERSION") = llama_version();
    m.attr("LLAMA_CPP_PIN") = skippy::pinned_package;
    m.def("set_log_level", &skippy::set_log_level, "level"_a,
          "Show llama.cpp's log from this level on: 0 nothing, 1 debug ... 4 errors.");
    m.def("has_amx", &skippy::has_amx, "Whether llama.cpp would lay weights out for AMX.");
    m.def("amx_fault", &skippy::amx_fault, nb::call_guard<nb::gil_scoped_release>(),
          "Why weights must not be rearranged for AMX here, or an empty string.");
    m.def(
        "devices",
        [] {
            std::vector<std::tuple<std::string, std::string>> devices;
            for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
                ggml_backend_dev_t device = ggml_backend_dev_get(i);
                devices.emplace_back(ggml_backend_dev_name(device), ggml_backend_dev_description(device));
            }
            return devices;
        },
        "(name, description) of every device that llama.cpp sees.");
    skippy::bind_model(m);
    skippy::bind_context(m);
    skippy::bind_sampler(m);
    skippy::bind_virtual(m);
}

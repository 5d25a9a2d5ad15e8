// The Python face of quantizing and of files that are made while they are read.
#include "virtual_bindings.h"

#include "quantize.h"
#include "stage_model.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <optional>
#include <stdexcept>
#include <tuple>

namespace nb = nanobind;
using namespace nb::literals;

namespace skippy {
namespace {

using TensorTuple = std::tuple<std::string, int, std::vector<int64_t>, uint64_t>;
using Importances = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Clock = std::chrono::steady_clock;

constexpr auto between_looks = std::chrono::milliseconds(50); // at signals, while quantizing

ggml_type checked_type(int type, const std::string &what) {
    if (type < 0 || type >= GGML_TYPE_COUNT || ggml_blck_size(static_cast<ggml_type>(type)) <= 0) {
        throw std::invalid_argument(what + ": type " + std::to_string(type) + " does not exist");
    }
    return static_cast<ggml_type>(type);
}

std::vector<VirtualTensor> virtual_tensors(const std::vector<TensorTuple> &tuples) {
    std::vector<VirtualTensor> tensors;
    for (const auto &[name, type, shape, offset] : tuples) {
        VirtualTensor tensor{name, checked_type(type, "tensor '" + name + "'"), {1, 1, 1, 1}, offset};
        if (shape.empty() || shape.size() > GGML_MAX_DIMS) {
            throw std::invalid_argument("tensor '" + name + "': wanted 1 to 4 dimensions");
        }
        for (size_t i = 0; i < shape.size(); ++i) {
            tensor.shape[i] = shape[i];
            if (shape[i] < 1 || (i == 0 && shape[0] % ggml_blck_size(tensor.type) != 0)) {
                throw std::invalid_argument("tensor '" + name + "': dimension " + std::to_string(i) + " is " +
                                            std::to_string(shape[i]));
            }
        }
        tensors.push_back(std::move(tensor));
    }
    return tensors;
}

// Bytes of a Python object, held for as long as they are looked at. Made with the GIL held, dropped anywhere.
struct HeldBuffer {
    explicit HeldBuffer(nb::handle object) {
        if (PyObject_GetBuffer(object.ptr(), &view, PyBUF_SIMPLE) != 0) {
            throw nb::python_error();
        }
    }
    ~HeldBuffer() {
        const nb::gil_scoped_acquire gil;
        PyBuffer_Release(&view);
    }
    HeldBuffer(const HeldBuffer &) = delete;
    HeldBuffer &operator=(const HeldBuffer &) = delete;
    const uint8_t *bytes() const { return static_cast<const uint8_t *>(view.buf); }

    Py_buffer view{};
};

void look_at_signals() {
    if (PyErr_CheckSignals() != 0) {
        throw nb::python_error();
    }
}

StageModel *open_virtual(const std::tuple<int, int, int, int> &layers, const nb::bytes &header,
                         const std::vector<TensorTuple> &tuples, const nb::callable &rows, const nb::object &progress,
                         ModelOptions options) {
    const auto produce = [&](size_t index, int64_t first, int64_t n_rows) {
        const nb::gil_scoped_acquire gil;
        const auto held = std::make_shared<HeldBuffer>(rows(index, first, n_rows));
        look_at_signals();
        const auto nbytes = static_cast<size_t>(held->view.len);
        return VirtualFile::Rows{{held, held->bytes()}, nbytes};
    };
    WeightFiles::Progress report;
    if (!progress.is_none()) {
        report = [&](float done) {
            const nb::gil_scoped_acquire gil;
            progress(done);
            return true;
        };
    }
    const auto &[begin, end, n_layers, n_blocks] = layers;
    std::string header_bytes(header.c_str(), header.size());
    std::vector<VirtualTensor> tensors = virtual_tensors(tuples);
    const nb::gil_scoped_release no_gil;
    VirtualFile file(std::move(header_bytes), std::move(tensors), produce, report);
    return new StageModel({begin, end, n_layers, n_blocks}, file, std::move(options));
}

nb::object quantized(const nb::object &source, int source_type, int type, int64_t row_length, int64_t first_row,
                     int64_t rows_per_expert, const std::optional<Importances> &imatrix, int threads) {
    const HeldBuffer held(source);
    RowsToQuantize rows{};
    rows.source = held.bytes();
    rows.source_type = checked_type(source_type, "source");
    rows.type = checked_type(type, "result");
    rows.row_length = row_length;
    rows.first_row = first_row;
    rows.rows_per_expert = rows_per_expert;
    const auto nbytes = static_cast<size_t>(held.view.len);
    const auto refuse = [](const std::string &why) { throw std::invalid_argument(why); };
    if (rows.source_type != GGML_TYPE_F32 && rows.source_type != GGML_TYPE_F16 && rows.source_type != GGML_TYPE_BF16) {
        refuse(std::string("wanted rows of f32, f16 or bf16, got ") + ggml_type_name(rows.source_type));
    }
    if (row_length < 1 || row_length % ggml_blck_size(rows.type) != 0) {
        refuse(std::string("rows of ") + ggml_type_name(rows.type) + " are multiples of " +
               std::to_string(ggml_blck_size(rows.type)) + " elements, got " + std::to_string(row_length));
    }
    const size_t row_bytes = ggml_row_size(rows.source_type, row_length);
    if (nbytes % row_bytes != 0) {
        refuse("wanted whole rows of " + std::to_string(row_bytes) + " bytes, got " + std::to_string(nbytes) +
               " bytes");
    }
    rows.n_rows = static_cast<int64_t>(nbytes / row_bytes);
    if (first_row < 0 || rows_per_expert < 1 || threads < 1) {
        refuse("wanted a first row from 0 on, rows per expert and threads from 1 on");
    }
    if (imatrix) {
        const int64_t experts = (first_row + rows.n_rows + rows_per_expert - 1) / rows_per_expert;
        if (static_cast<int64_t>(imatrix->size()) < experts * row_length) {
            refuse("importances: wanted " + std::to_string(experts * row_length) + ", got " +
                   std::to_string(imatrix->size()));
        }
        rows.imatrix = imatrix->data();
    } else if (ggml_quantize_requires_imatrix(rows.type)) {
        refuse(std::string(ggml_type_name(rows.type)) + " needs importances");
    }
    const size_t made = ggml_row_size(rows.type, row_length) * static_cast<size_t>(rows.n_rows);
    std::unique_ptr<uint8_t[]> out(new uint8_t[made]);
    {
        const nb::gil_scoped_release no_gil;
        auto looked = Clock::now();
        quantize_rows(rows, out.get(), threads, [&] {
            if (Clock::now() - looked > between_looks) {
                const nb::gil_scoped_acquire gil;
                look_at_signals();
                looked = Clock::now();
            }
            return true;
        });
    }
    uint8_t *values = out.release();
    const nb::capsule owner(values, [](void *p) noexcept { delete[] static_cast<uint8_t *>(p); });
    return nb::cast(nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(values, {made}, owner));
}

} // namespace

void bind_virtual(nb::module_ &m) {
    m.def(
        "open_virtual",
        [](const std::tuple<int, int, int, int> &layers, const nb::bytes &header,
           const std::vector<TensorTuple> &tensors, const nb::callable &rows, const nb::object &progress,
           std::vector<std::string> devices, int n_gpu_layers, int main_gpu, std::string split_mode,
           std::vector<float> tensor_split, bool mlock, bool direct_io, bool repack, bool no_host_buffer) {
            ModelOptions options;
            options.devices = std::move(devices);
            options.n_gpu_layers = n_gpu_layers;
            options.main_gpu = main_gpu;
            options.split_mode = std::move(split_mode);
            options.tensor_split = std::move(tensor_split);
            options.mlock = mlock;
            options.direct_io = direct_io;
            options.repack = repack;
            options.no_host_buffer = no_host_buffer;
            return open_virtual(layers, header, tensors, rows, progress, std::move(options));
        },
        nb::rv_policy::take_ownership, "layers"_a, "header"_a, "tensors"_a, "rows"_a, "progress"_a.none(),
        nb::kw_only(), "devices"_a, "n_gpu_layers"_a, "main_gpu"_a, "split_mode"_a, "tensor_split"_a, "mlock"_a,
        "direct_io"_a, "repack"_a, "no_host_buffer"_a,
        nb::sig("def open_virtual(layers: tuple[int, int, int, int], header: bytes, tensors: Sequence[tuple[str, int, "
                "Sequence[int], int]], rows: collections.abc.Callable[[int, int, int], object], progress: "
                "collections.abc.Callable[[float], object] | "
                "None, *, devices: Sequence[str], n_gpu_layers: int, main_gpu: int, split_mode: str, tensor_split: "
                "Sequence[float], mlock: bool, direct_io: bool, repack: bool, no_host_buffer: bool) -> StageModel"),
        "Open layers of a GGUF file of which only the header exists. `tensors`: (name, type, shape innermost first, "
        "offset) in file order; rows(tensor number, first row, number of rows) returns the bytes of those rows.");
    m.def(
        "recipe_types",
        [](const nb::bytes &header, const std::vector<TensorTuple> &tuples, int file_type, bool has_imatrix) {
            const std::string header_bytes(header.c_str(), header.size());
            const std::vector<VirtualTensor> tensors = virtual_tensors(tuples);
            std::vector<RecipeType> types;
            {
                const nb::gil_scoped_release no_gil;
                types = recipe_types(header_bytes, tensors, static_cast<llama_ftype>(file_type), has_imatrix);
            }
            std::vector<std::tuple<int, int>> result;
            for (const RecipeType &type : types) {
                result.emplace_back(type.type, type.without_fallback);
            }
            return result;
        },
        "header"_a, "tensors"_a, "file_type"_a, "has_imatrix"_a,
        "For each tensor, the type that llama.cpp's quantizer gives it, and what that would be if rows of every length "
        "fitted every type.");
    m.def("quantize_rows", &quantized, "source"_a, "source_type"_a, "type"_a, "row_length"_a, "first_row"_a,
          "rows_per_expert"_a, "imatrix"_a.none(), "threads"_a,
          nb::sig("def quantize_rows(source: object, source_type: int, type: int, row_length: int, first_row: int, "
                  "rows_per_expert: int, imatrix: NDArray[numpy.float32] | None, threads: int) -> "
                  "NDArray[numpy.uint8]"),
          "Quantize rows of f32, f16 or bf16 as llama.cpp's quantizer does.");
}

} // namespace skippy

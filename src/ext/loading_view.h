// What llama.cpp is told about this machine while a stage loads. It asks the CPU back end two questions whose usual
// answers suit a whole model only:
// - Is this a NUMA machine? If not, it has the kernel read a mapped file as a whole, other stages' layers too.
// - Can the CPU use weights where the file is mapped? If so, it never copies them (what --no-mmap asks for) in mapped
//   mode; and only in mapped mode are other stages' bytes left unread.
#pragma once

namespace skippy {

// One load at a time per process: others wait. A load by somebody else in this process that happens meanwhile merely
// goes without prefetch or mapping, too.
class LoadingView {
  public:
    explicit LoadingView(bool copy_weights);
    ~LoadingView();
    LoadingView(const LoadingView &) = delete;
    LoadingView &operator=(const LoadingView &) = delete;
};

} // namespace skippy

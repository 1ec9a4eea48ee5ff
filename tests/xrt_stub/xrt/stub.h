// What src/tilefuse/_xrt/module.cpp uses of XRT's C++ API, on this machine's memory: enough to compile the binding and
// to call it. Names and signatures are XRT's; a run copies its first data buffer to the last.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

enum xclBOSyncDirection { XCL_BO_SYNC_BO_TO_DEVICE = 0, XCL_BO_SYNC_BO_FROM_DEVICE = 1 };
enum ert_cmd_state {
  ERT_CMD_STATE_NEW = 1,
  ERT_CMD_STATE_QUEUED = 2,
  ERT_CMD_STATE_RUNNING = 3,
  ERT_CMD_STATE_COMPLETED = 4,
  ERT_CMD_STATE_ERROR = 5,
  ERT_CMD_STATE_ABORT = 6,
  ERT_CMD_STATE_SUBMITTED = 7,
  ERT_CMD_STATE_TIMEOUT = 8,
  ERT_CMD_STATE_NORESPONSE = 9,
  ERT_CMD_STATE_SKERROR = 10,
  ERT_CMD_STATE_SKCRASHED = 11
};

namespace xrt {

using memory_group = uint32_t;

class uuid {
 public:
  std::string to_string() const { return "00000000-0000-0000-0000-000000000001"; }
};

class xclbin {
 public:
  class kernel {
   public:
    std::string get_name() const { return "MLIR_AIE"; }
    size_t get_num_args() const { return 8; }
  };
  explicit xclbin(const std::string& filename) {
    if (filename.empty()) throw std::runtime_error("no file name");
  }
  std::vector<kernel> get_kernels() const { return {kernel()}; }
  std::string get_xsa_name() const { return "xsa"; }
  uuid get_uuid() const { return {}; }
};

namespace info {
enum class device { bdf, name, platform, host };
}

class device {
 public:
  explicit device(unsigned int index) {
    if (index != 0) throw std::runtime_error("No such device with index '" + std::to_string(index) + "'");
  }
  uuid register_xclbin(const xclbin&) { return {}; }
  template <info::device kKey>
  std::string get_info() const {
    return kKey == info::device::name ? "NPU Strix" : "0000:c5:00.1";
  }
};

class hw_context {
 public:
  hw_context(const device&, const uuid&) {}
};

class bo {
 public:
  enum class flags : uint32_t { normal, cacheable, device_only, host_only, p2p, svm };
  bo() = default;
  bo(const device&, size_t size, flags, memory_group) : memory_(std::make_shared<Memory>(size)) {}
  void write(const void* data, size_t size, size_t seek) {
    check(size, seek);
    std::memcpy(memory_->host.data() + seek, data, size);
  }
  void read(void* data, size_t size, size_t skip) {
    check(size, skip);
    std::memcpy(data, memory_->host.data() + skip, size);
  }
  void sync(xclBOSyncDirection direction, size_t size, size_t offset) {
    check(size, offset);
    auto& from = direction == XCL_BO_SYNC_BO_TO_DEVICE ? memory_->host : memory_->device;
    auto& to = direction == XCL_BO_SYNC_BO_TO_DEVICE ? memory_->device : memory_->host;
    std::memcpy(to.data() + offset, from.data() + offset, size);
  }
  void sync(xclBOSyncDirection direction) { sync(direction, size(), 0); }
  void* map() { return memory_->host.data(); }
  size_t size() const { return memory_->host.size(); }
  uint64_t address() const { return 0x1000; }
  std::vector<char>& on_device() const { return memory_->device; }

 private:
  struct Memory {
    explicit Memory(size_t size) : host(size), device(size) {}
    std::vector<char> host, device;
  };
  void check(size_t size, size_t offset) const {
    if (offset + size > this->size()) throw std::runtime_error("attempting to access past buffer size");
  }
  std::shared_ptr<Memory> memory_;
};

class kernel {
 public:
  kernel(const hw_context&, const std::string& name) {
    if (name != "MLIR_AIE") throw std::runtime_error("No kernel '" + name + "'");
  }
  int group_id(int index) const { return index; }
};

class run {
 public:
  explicit run(const kernel&) : state_(std::make_shared<State>()) {}
  void set_arg(int index, const bo& value) { state_->buffers[index] = value; }
  void set_arg(int index, int value) { state_->scalars[index] = value; }
  void start() const {
    if (state_->scalars[0] != 3) throw std::runtime_error("the opcode is 3");
    state_->buffers.rbegin()->second.on_device() = state_->buffers.at(3).on_device();
    state_->value = ERT_CMD_STATE_COMPLETED;
  }
  ert_cmd_state wait(const std::chrono::milliseconds&) const { return state_->value; }
  ert_cmd_state state() const { return state_->value; }

 private:
  struct State {
    std::map<int, bo> buffers;
    std::map<int, int> scalars;
    ert_cmd_state value = ERT_CMD_STATE_NEW;
  };
  std::shared_ptr<State> state_;
};

class runlist {
 public:
  explicit runlist(const hw_context&) {}
  void add(const run& one) { runs_.push_back(one); }
  void execute() {
    for (const run& one : runs_) one.start();
  }
  void wait() const {}
  std::cv_status wait(const std::chrono::milliseconds&) const { return std::cv_status::no_timeout; }

 private:
  std::vector<run> runs_;
};

}  // namespace xrt

#ifndef JAX_EP_CSRC_CORE_STATUS_H_
#define JAX_EP_CSRC_CORE_STATUS_H_

#include <string>
#include <utility>

namespace jax_ep {

// Success, or an error with its text.
class Status {
 public:
  Status() = default;
  static Status Error(std::string message) {
    Status status;
    status.message_ = std::move(message);
    status.ok_ = false;
    return status;
  }

  bool ok() const { return ok_; }
  const std::string& message() const { return message_; }

 private:
  bool ok_ = true;
  std::string message_;
};

}  // namespace jax_ep

#endif  // JAX_EP_CSRC_CORE_STATUS_H_

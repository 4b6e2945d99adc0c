// AdamW (Loshchilov & Hutter 2019) on host memory, in one pass: every number is read once and written once.
//
// It goes block by block: parameters and moments are updated from gradients that are widened and scaled as they are
// read; then, while they are in the first-level cache, parameters are rounded into a copy that is streamed past the
// caches. What each loop does is simple enough for the compiler to vectorise, so there is no code for a particular
// processor. Operations are those of PyTorch's vectorised kernel, in its order and rounded where it rounds.

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

constexpr int64_t BLOCK = 128;  // elements: as many as are rounded at a time
constexpr int64_t WORTH_THREADS = 1 << 15;

enum Kind : int { NONE, FLOAT64, FLOAT32, BF16, FP16 };

uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// a·b + c, rounded once where the processor has that.
template <class T>
T fused(T a, T b, T c) {
#if defined(__FP_FAST_FMA) && defined(__FP_FAST_FMAF)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

struct Bf16 {
  uint16_t bits;

  explicit operator float() const { return float_of(uint32_t(bits) << 16); }

  // To nearest, ties to even: of the bits that are cut off, more than half carries into those that stay.
  static Bf16 rounded(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return {uint16_t(value == value ? nearest : 0x7fc0)};
  }
};

struct Fp16 {
  uint16_t bits;

  // The exponent is biased by 15 here and by 127 there. The product is exact, for subnormal numbers too.
  explicit operator float() const {
    const uint32_t sign = uint32_t(bits & 0x8000) << 16, rest = uint32_t(bits & 0x7fff) << 13;
    const uint32_t finite = bits_of(float_of(rest) * 0x1p112f);
    return float_of(sign | ((bits & 0x7c00) == 0x7c00 ? rest | 0x7f800000 : finite));
  }

  // To nearest, ties to even. Adding 0.5 to a number below the smallest normal one rounds it to multiples of 2^-24.
  static Fp16 rounded(float value) {
    const uint32_t bits = bits_of(value), sign = bits & 0x80000000, size = bits ^ sign;
    const uint32_t normal = (size - (112u << 23) + 0xfff + ((size >> 13) & 1)) >> 13;
    const uint32_t subnormal = bits_of(float_of(size) + 0.5f) - bits_of(0.5f);
    const uint32_t beyond = size > 0x7f800000 ? 0x7e00 : 0x7c00;
    const uint32_t within = size < (113u << 23) ? subnormal : normal;
    return {uint16_t((sign >> 16) | (size >= (143u << 23) ? beyond : within))};
  }
};

template <class T>
struct Rates {
  T factor, decay, beta2, rest1, rest2, root, eps, size;
};

template <class T, class G>
T widened(G value) {
  if constexpr (sizeof value == 2)
    return T(float(value));
  else
    return T(value);
}

template <class T, class G>
void update(T* __restrict params, T* __restrict exp_avg, T* __restrict exp_avg_sq, const G* __restrict grads,
            int64_t count, const Rates<T> rates) {
#pragma omp simd
  for (int64_t i = 0; i < count; i++) {
    const T grad = widened<T>(grads[i]) * rates.factor, change = grad - exp_avg[i];
    // Of the two ways to write the mean, each is the exact one at its end.
    const T mean = rates.rest1 < T(0.5) ? fused(rates.rest1, change, exp_avg[i]) : fused(rates.rest1 - 1, change, grad);
    const T square = fused(rates.rest2 * grad, grad, exp_avg_sq[i] * rates.beta2);
    exp_avg[i] = mean;
    exp_avg_sq[i] = square;
    params[i] = params[i] * rates.decay - rates.size * mean / (std::sqrt(square) / rates.root + rates.eps);
  }
}

template <class H, class T>
void narrow(uint16_t* __restrict to, const T* __restrict params, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; i++) to[i] = H::rounded(float(params[i])).bits;
}

// Nobody reads the copy before the update is through: written around the caches, its old contents need not be read.
void stream(uint16_t* to, const uint16_t* from, int64_t count) {
#if defined(__SSE2__)
  if (reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    for (; count >= 8; count -= 8, to += 8, from += 8)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to), _mm_load_si128(reinterpret_cast<const __m128i*>(from)));
  }
#endif
  std::memcpy(to, from, count * sizeof *to);
}

template <class T>
void range(T* params, const void* grads, T* exp_avg, T* exp_avg_sq, uint16_t* half, int64_t from, int64_t until,
           Kind grad_kind, Kind half_kind, const Rates<T>& rates) {
  alignas(64) uint16_t rounded[BLOCK];
  for (int64_t at = from; at < until; at += BLOCK) {
    const int64_t count = until - at < BLOCK ? until - at : BLOCK;
    const auto with = [&](auto* all) { update(params + at, exp_avg + at, exp_avg_sq + at, all + at, count, rates); };
    switch (grad_kind) {
      case FLOAT64: with(static_cast<const double*>(grads)); break;
      case FLOAT32: with(static_cast<const float*>(grads)); break;
      case BF16: with(static_cast<const Bf16*>(grads)); break;
      default: with(static_cast<const Fp16*>(grads));
    }
    if (half_kind == NONE) continue;
    half_kind == BF16 ? narrow<Bf16>(rounded, params + at, count) : narrow<Fp16>(rounded, params + at, count);
    stream(half + at, rounded, count);
  }
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

template <class T>
void adamw(void* params, const void* grads, void* exp_avg, void* exp_avg_sq, void* half, int64_t count, Kind grad_kind,
           Kind half_kind, int threads, const Rates<T> rates) {
  const int64_t blocks = (count + BLOCK - 1) / BLOCK;
  if (count < WORTH_THREADS) threads = 1;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int part = 0; part < threads; part++) {
    const int64_t from = blocks * part / threads * BLOCK, until = blocks * (part + 1) / threads * BLOCK;
    range(static_cast<T*>(params), grads, static_cast<T*>(exp_avg), static_cast<T*>(exp_avg_sq),
          static_cast<uint16_t*>(half), from, until < count ? until : count, grad_kind, half_kind, rates);
  }
}

}  // namespace

// ``step``, from 1, corrects the bias of both moments. ``half`` may be null, with the kind NONE.
extern "C" void host_adamw(void* params, const void* grads, void* exp_avg, void* exp_avg_sq, void* half, int64_t count,
                           int kind, int grad_kind, int half_kind, int threads, double lr, double beta1, double beta2,
                           double eps, double weight_decay, int64_t step, double factor) {
  const double size = lr / (1 - std::pow(beta1, double(step))), root = std::sqrt(1 - std::pow(beta2, double(step)));
  const auto go = [&](auto zero) {
    using T = decltype(zero);
    const Rates<T> rates{T(factor),    T(1 - lr * weight_decay), T(beta2), T(1 - beta1),
                         T(1 - beta2), T(root),                  T(eps),   T(size)};
    adamw<T>(params, grads, exp_avg, exp_avg_sq, half, count, Kind(grad_kind), Kind(half_kind), threads, rates);
  };
  kind == FLOAT64 ? go(0.0) : go(0.0f);
}

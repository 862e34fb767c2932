// A driver for tests: it does what comes to its streams at once, in the order of the calls, and
// keeps a record. Signatures are those of cuda.h; what launches need of Triton is at the end.
#include <cuda.h>
#include <stdint.h>
#include <string.h>
#include <dlfcn.h>

#define FAKE __attribute__((visibility("default")))
enum { RECORD = 1, FOLLOW, COPY, WRITE, WAIT, LAUNCH, TORCH, COPY_ROWS };
typedef struct { uint64_t what, stream, a, b, c; } Done;

#define MOST 4096
FAKE Done fake_done[MOST];
FAKE int64_t fake_count = 0;        // of operations since it was set to 0
FAKE int64_t fake_refuse_at = -1;   // the operation that is refused, by that count
FAKE __thread uint64_t fake_context = 1;  // of the calling thread; 0 for none
FAKE uint64_t fake_used = 0;              // that of the last operation
FAKE int fake_code = 700, fake_moves = 0, fake_capturing = 0;  // with this code; are bytes moved?
#define FUNCTIONS 64
FAKE size_t fake_sizes[FUNCTIONS][128];  // of a kernel's parameters, ended by 0
FAKE unsigned char fake_parameters[16][4096];  // of the last launches, one behind the other
FAKE int64_t fake_launches = 0, fake_functions = 0;

static CUresult note(uint64_t what, CUstream stream, uint64_t a, uint64_t b, uint64_t c) {
    if (fake_count == fake_refuse_at) return (CUresult)fake_code;
    if (!fake_context) return CUDA_ERROR_INVALID_CONTEXT;
    fake_used = fake_context;
    Done done = {what, (uint64_t)(uintptr_t)stream, a, b, c};
    fake_done[fake_count++ % MOST] = done;
    return CUDA_SUCCESS;
}

// a kernel of torch's, of which the driver knows nothing
FAKE CUresult fake_torch(CUstream stream, uint64_t a, uint64_t b, uint64_t c) {
    return note(TORCH, stream, a, b, c);
}
FAKE CUresult cuEventCreate(CUevent *event, unsigned flags) { *event = (CUevent)77; return 0; }
FAKE CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    *status = (CUstreamCaptureStatus)(fake_capturing > 0);
    if (!fake_context) return CUDA_ERROR_INVALID_CONTEXT;
    return fake_capturing < 0 ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_SUCCESS;
}
FAKE CUresult cuEventRecord(CUevent event, CUstream stream) {
    return note(RECORD, stream, (uintptr_t)event, 0, 0);
}
FAKE CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    return note(FOLLOW, stream, (uintptr_t)event, flags, 0);
}
FAKE CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    CUresult code = note(COPY, stream, to, from, size);
    if (!code && fake_moves) memmove((void *)to, (void *)from, size);
    return code;
}
FAKE CUresult cuMemcpy2DAsync(const CUDA_MEMCPY2D *box, CUstream stream) {
    CUresult code = note(COPY_ROWS, stream, box->dstDevice, box->srcDevice, box->WidthInBytes);
    if (box->srcMemoryType != CU_MEMORYTYPE_UNIFIED || box->dstMemoryType != CU_MEMORYTYPE_UNIFIED)
        return CUDA_ERROR_INVALID_VALUE;
    if (!code) code = note(COPY_ROWS, stream, box->Height, box->srcPitch, box->dstPitch);
    for (size_t row = 0; !code && fake_moves && row < box->Height; row++)
        memmove((char *)box->dstDevice + row * box->dstPitch,
                (char *)box->srcDevice + row * box->srcPitch, box->WidthInBytes);
    return code;
}
FAKE CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr at, cuuint32_t word, unsigned f) {
    CUresult code = note(WRITE, stream, at, word, f);
    if (!code && fake_moves) *(volatile uint32_t *)at = word;
    return code;
}
FAKE CUresult cuStreamWaitValue32(CUstream stream, CUdeviceptr at, cuuint32_t word, unsigned f) {
    return note(WAIT, stream, at, word, f);
}
FAKE CUresult cuStreamBatchMemOp(
    CUstream stream, unsigned count, CUstreamBatchMemOpParams *given, unsigned flags) {
    CUresult code = 0;
    for (unsigned i = 0; i < count && !code; i++)
        code = given[i].operation == CU_STREAM_MEM_OP_WRITE_VALUE_32
            ? cuStreamWriteValue32(stream, given[i].writeValue.address, given[i].writeValue.value,
                                   given[i].writeValue.flags)
            : cuStreamWaitValue32(stream, given[i].waitValue.address, given[i].waitValue.value,
                                  given[i].waitValue.flags);
    return code;
}
FAKE CUresult cuLaunchKernelEx(
    const CUlaunchConfig *how, CUfunction function, void **given, void **extra) {
    unsigned char *to = fake_parameters[fake_launches++ % 16];
    const size_t *sizes = fake_sizes[(uintptr_t)function % FUNCTIONS];
    for (int i = 0; sizes[i]; to += sizes[i], i++) memcpy(to, given[i], sizes[i]);
    uint64_t shape = (uint64_t)how->gridDimX << 32 | how->blockDimX;
    return note(LAUNCH, how->hStream, (uintptr_t)function, shape, how->sharedMemBytes);
}
FAKE CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t *offset, size_t *size) {
    *offset = 0, *size = index < 127 ? fake_sizes[(uintptr_t)function % FUNCTIONS][index] : 0;
    return *size ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
// A descriptor is its address, then all that it was made of.
FAKE CUresult cuTensorMapReplaceAddress(CUtensorMap *map, void *address) {
    memcpy(map, &address, 8);
    return 0;
}
FAKE CUresult cuTensorMapEncodeTiled(
    CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
    const cuuint64_t *shape, const cuuint64_t *strides, const cuuint32_t *box,
    const cuuint32_t *steps, CUtensorMapInterleave i, CUtensorMapSwizzle s,
    CUtensorMapL2promotion l2, CUtensorMapFloatOOBfill fill) {
    uint64_t made[16] = {0, shape[0], shape[1], strides[0], box[0], box[1], steps[0], steps[1],
                         type, rank, i, s, l2, fill};
    memcpy(map, made, sizeof *map);
    return cuTensorMapReplaceAddress(map, address);
}

// What else Triton and cuda.bindings ask for.
FAKE CUresult cuInit(unsigned f) { return 0; }
FAKE CUresult cuGetErrorString(CUresult code, const char **text) { *text = "fake"; return 0; }
FAKE CUresult cuDriverGetVersion(int *version) { *version = 13000; return 0; }
FAKE CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal; return 0; }
FAKE CUresult cuDeviceGetCount(int *count) { *count = 1; return 0; }
FAKE CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute what, CUdevice device) {
    *value = what == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 232448 : 132;
    return 0;
}
FAKE CUresult cuCtxGetCurrent(CUcontext *c) { *c = (CUcontext)fake_context; return 0; }
FAKE CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; return 0; }
FAKE CUresult cuModuleUnload(CUmodule module) { return 0; }
FAKE CUresult cuCtxSetCurrent(CUcontext c) { fake_context = (uint64_t)(uintptr_t)c; return 0; }
FAKE CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice device) {
    *c = (CUcontext)(uintptr_t)(1 + device);
    return device < 8 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
FAKE uint64_t fake_own_context(void) { return fake_context; }
FAKE CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return 0; }
FAKE CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return 0; }
FAKE CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    *module = (CUmodule)1;
    return 0;
}
FAKE CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = (CUfunction)(uintptr_t)++fake_functions;
    return 0;
}
FAKE CUresult cuFuncGetAttribute(int *value, CUfunction_attribute a, CUfunction f) {
    *value = 1024;
    return 0;
}
FAKE CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int value) { return 0; }
FAKE CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache config) { return 0; }
FAKE CUresult cuPointerGetAttribute(void *value, CUpointer_attribute a, CUdeviceptr at) {
    *(CUdeviceptr *)value = at;
    return 0;
}
#undef cuGetProcAddress
FAKE CUresult cuGetProcAddress_v2(
    const char *name, void **found, int version, cuuint64_t flags,
    CUdriverProcAddressQueryResult *status) {
    char newer[128] = {0};
    strncat(strncat(newer, name, 100), "_v2", 4);
    *found = dlsym(RTLD_DEFAULT, newer);
    void *self = *found ? 0 : dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (self) *found = dlsym(self, newer);
    if (self && !*found) *found = dlsym(self, name);
    return *found ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

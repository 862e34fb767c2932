// A list of driver calls that runs in one call from Python. `enqueue.py` builds and explains it.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>

#define TABLE 16  // the first register of the table; those below change from call to call
#define REGISTERS (TABLE + 512)
#define PARAMETERS 96
#define ALIGNED 128  // as descriptors lie in a kernel's parameters
enum { RECORD, FOLLOW, COPY, COPY_ROWS, WRITE, WAIT, LAUNCH, KINDS };
#define BATCH 64  // signals and waits in one call to the driver
enum { AS_WORD, AS_ADDRESS, AS_MAP };  // how a value goes into a kernel's parameters
static const size_t SIZES[] = {4, 8, 152};  // of each; behind a descriptor are sizes and strides

typedef struct { int from; uint64_t add; } Value;  // registers[from] + add
typedef struct { int how; size_t at; Value value; } Patch;
// How one goes into a kernel's parameters, and where; the rest is of descriptors.
typedef struct { int how, at, type, itemsize, swizzle, block_rows, block_columns; } Parameter;
typedef struct {
    CUfunction function;
    CUlaunchConfig config;
    unsigned char *memory;  // the parameters; aligned as descriptors need it
    void *parameters[PARAMETERS];
    int count, patch_count;
    Patch patches[PARAMETERS];
} Kernel;
typedef struct { int kind; Value stream, a, b, c, rows, pitch; Kernel *kernel; } Operation;
typedef struct {
    PyObject_HEAD
    int count, eager;
    int highest;  // of the registers below the table that it uses
    Py_ssize_t table;  // its size in bytes
    CUcontext context;  // of the device whose streams it uses
    Operation *operations;
} List;

// cuda.h renames functions to their newest versions: so do their names as text
#define TEXT(name) #name
#define NAME(name) TEXT(name)
#define FUNCTIONS(use) \
    use(cuEventRecord) use(cuStreamWaitEvent) use(cuMemcpyDtoDAsync) use(cuMemcpy2DAsync) \
    use(cuStreamWriteValue32) use(cuStreamWaitValue32) use(cuStreamBatchMemOp) use(cuLaunchKernelEx) \
    use(cuTensorMapEncodeTiled) use(cuTensorMapReplaceAddress) use(cuStreamIsCapturing) \
    use(cuFuncGetParamInfo) use(cuDevicePrimaryCtxRetain) use(cuCtxGetCurrent) use(cuCtxSetCurrent)
#define DECLARE(name) static __typeof__(&name) p_##name;
FUNCTIONS(DECLARE)
static const char *const NAMES[KINDS] = {
    "cuEventRecord", "cuStreamWaitEvent", "cuMemcpyDtoDAsync", "cuMemcpy2DAsync",
    "cuStreamWriteValue32", "cuStreamWaitValue32", "cuLaunchKernelEx"};

// Lists share an event and the memory of parameters: one thread at a time runs one.
static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;

static uint64_t value_of(Value value, const uint64_t *registers) {
    return registers[value.from] + value.add;
}

static CUresult patch(Kernel *kernel, const uint64_t *registers) {
    CUresult code = CUDA_SUCCESS;
    for (int i = 0; i < kernel->patch_count && !code; i++) {
        const Patch *one = &kernel->patches[i];
        unsigned char *to = kernel->memory + one->at;
        uint64_t value = value_of(one->value, registers);
        if (one->how == AS_MAP) code = p_cuTensorMapReplaceAddress((CUtensorMap *)to, (void *)value);
        else memcpy(to, &value, one->how == AS_WORD ? 4 : 8);
    }
    return code;
}

static int is_word(const Operation *one) { return one->kind == WRITE || one->kind == WAIT; }

// signals and waits that follow each other in the copy engine's stream
static int together(const Operation *first, int left) {
    int count = is_word(first);
    while (count && count < left && count < BATCH && is_word(&first[count])) count++;
    return count;
}

static CUresult batch(const Operation *first, int count, const uint64_t *registers) {
    CUstreamBatchMemOpParams given[BATCH];
    memset(given, 0, count * sizeof *given);
    for (int i = 0; i < count; i++) {  // a wait has the same fields at the same places
        given[i].operation = first[i].kind == WRITE ? CU_STREAM_MEM_OP_WRITE_VALUE_32
                                                    : CU_STREAM_MEM_OP_WAIT_VALUE_32;
        given[i].writeValue.address = value_of(first[i].a, registers);
        given[i].writeValue.value = (cuuint32_t)value_of(first[i].b, registers);
    }
    CUstream stream = (CUstream)(uintptr_t)value_of(first->stream, registers);
    return p_cuStreamBatchMemOp(stream, count, given, 0);
}

static CUresult copy_rows(const Operation *one, const uint64_t *registers, CUstream stream) {
    size_t pitch = value_of(one->pitch, registers);
    CUDA_MEMCPY2D box = {.srcMemoryType = CU_MEMORYTYPE_UNIFIED, .srcPitch = pitch,
                         .srcDevice = value_of(one->b, registers),
                         .dstMemoryType = CU_MEMORYTYPE_UNIFIED, .dstPitch = pitch,
                         .dstDevice = value_of(one->a, registers),
                         .WidthInBytes = value_of(one->c, registers),
                         .Height = value_of(one->rows, registers)};
    return p_cuMemcpy2DAsync(&box, stream);
}

static CUresult run_one(const Operation *one, const uint64_t *registers) {
    CUstream stream = (CUstream)(uintptr_t)value_of(one->stream, registers);
    uint64_t a = value_of(one->a, registers), b = value_of(one->b, registers);
    switch (one->kind) {
    case RECORD: return p_cuEventRecord((CUevent)(uintptr_t)a, stream);
    case FOLLOW: return p_cuStreamWaitEvent(stream, (CUevent)(uintptr_t)a, 0);
    case COPY: return p_cuMemcpyDtoDAsync(a, b, value_of(one->c, registers), stream);
    case COPY_ROWS: return copy_rows(one, registers, stream);
    // flags 0: the write is ordered after all earlier writes of the stream
    case WRITE: return p_cuStreamWriteValue32(stream, a, (cuuint32_t)b, 0);
    // flags 0: until the difference of the two, as a signed number, is at least 0
    case WAIT: return p_cuStreamWaitValue32(stream, a, (cuuint32_t)b, 0);
    default: break;
    }
    CUresult code = patch(one->kernel, registers);
    one->kernel->config.hStream = stream;
    return code ? code
                : p_cuLaunchKernelEx(&one->kernel->config, one->kernel->function,
                                     one->kernel->parameters, NULL);
}

// List(device, words): with a table of so many. The thread that runs it may use another device, or
// have no context yet, as a new thread of autograd has
static int List_init(PyObject *self, PyObject *arguments, PyObject *named) {
    int device, words;
    if (!PyArg_ParseTuple(arguments, "ii", &device, &words)) return -1;
    if (words < 0 || words > REGISTERS - TABLE) {
        PyErr_Format(PyExc_ValueError, "a table of %d words given", words);
        return -1;
    }
    ((List *)self)->table = words * sizeof(uint64_t);
    // torch holds it as long as the process lives
    CUresult code = p_cuDevicePrimaryCtxRetain(&((List *)self)->context, device);
    if (code) PyErr_Format(PyExc_RuntimeError, "cuDevicePrimaryCtxRetain failed: %d", (int)code);
    return code ? -1 : 0;
}

// run(table, stream, ...): of an eager list False, and nothing enqueued, in a capture, or where the
// driver does not say whether there is one: the caller will ask again
static PyObject *List_run(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    const List *list = (List *)self;
    uint64_t registers[REGISTERS];
    memset(registers, 0, TABLE * sizeof *registers);
    Py_ssize_t size = count && PyBytes_Check(given[0]) ? PyBytes_GET_SIZE(given[0]) : -1;
    if (count > TABLE || count <= list->highest || size != list->table)
        return PyErr_Format(PyExc_ValueError, "%zd registers, a table of %zd bytes given, more than "
                            "%d and %zd bytes expected", count, size, list->highest, list->table);
    memcpy(registers + TABLE, PyBytes_AS_STRING(given[0]), size);
    for (int i = 1; i < count; i++) {
        registers[i] = PyLong_AsUnsignedLongLongMask(given[i]);
        if (PyErr_Occurred()) return NULL;
    }
    CUresult code = CUDA_SUCCESS;
    CUcontext before = NULL;
    int at = 0, eager = 1;
    CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&one_at_a_time);
    if (p_cuCtxGetCurrent(&before) || before != list->context) p_cuCtxSetCurrent(list->context);
    if (list->eager)
        eager = !p_cuStreamIsCapturing((CUstream)(uintptr_t)registers[1], &capturing) && !capturing;
    while (eager && at < list->count) {
        const Operation *one = &list->operations[at];
        int words = together(one, list->count - at);
        if ((code = words > 1 ? batch(one, words, registers) : run_one(one, registers))) break;
        at += words > 1 ? words : 1;
    }
    if (before != list->context) p_cuCtxSetCurrent(before);
    pthread_mutex_unlock(&one_at_a_time);
    Py_END_ALLOW_THREADS
    if (code) {
        const Operation *one = &list->operations[at];
        const char *name = together(one, list->count - at) > 1 ? "cuStreamBatchMemOp" : NAMES[one->kind];
        return PyErr_Format(PyExc_RuntimeError, "%s failed: %d (operation %d of %d)", name,
                            (int)code, at + 1, list->count);
    }
    return PyBool_FromLong(eager);
}

static Operation *more(List *list) {
    Operation *grown = PyMem_Realloc(list->operations, (list->count + 1) * sizeof *grown);
    if (!grown) return (Operation *)PyErr_NoMemory();
    list->operations = grown;
    return memset(&grown[list->count++], 0, sizeof *grown);
}

// whether a run has the register; what a list is built of is checked here, so no run needs to
static int known(List *list, Value value) {
    int last = TABLE + list->table / sizeof(uint64_t) - 1;
    if (value.from < 0 || value.from > last) {
        PyErr_Format(PyExc_IndexError, "register %d given, 0 to %d expected", value.from, last);
        return 0;
    }
    if (value.from < TABLE && value.from > list->highest) list->highest = value.from;
    return 1;
}

#define VALUE "(iK)"
#define INTO(value) &(value).from, &(value).add

// add(operations): tuples of a kind, a stream and values; those that a kind does not have are 0
static PyObject *List_add(PyObject *self, PyObject *operations) {
    if (!PyList_Check(operations)) return PyErr_Format(PyExc_TypeError, "a list expected");
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(operations); i++) {
        Operation one = {0};
        if (!PyArg_ParseTuple(PyList_GET_ITEM(operations, i),
                              "i" VALUE VALUE "|" VALUE VALUE VALUE VALUE, &one.kind,
                              INTO(one.stream), INTO(one.a), INTO(one.b), INTO(one.c),
                              INTO(one.rows), INTO(one.pitch))) return NULL;
        if (one.kind < 0 || one.kind >= LAUNCH)
            return PyErr_Format(PyExc_ValueError, "operation %d given", one.kind);
        const Value values[] = {one.stream, one.a, one.b, one.c, one.rows, one.pitch};
        for (size_t n = 0; n < sizeof values / sizeof *values; n++)
            if (!known((List *)self, values[n])) return NULL;
        Operation *to = more((List *)self);
        if (!to) return NULL;
        *to = one;
    }
    Py_RETURN_NONE;
}

// A number now, or an operand in each run.
static int put_number(List *list, Kernel *kernel, const Parameter *to, PyObject *value) {
    unsigned char *at = kernel->memory + to->at;
    kernel->parameters[kernel->count++] = at;
    if (PyLong_Check(value)) {
        uint64_t number = PyLong_AsUnsignedLongLongMask(value);
        memcpy(at, &number, SIZES[to->how]);
        return !PyErr_Occurred();
    }
    Patch *patch = &kernel->patches[kernel->patch_count++];
    patch->how = to->how, patch->at = to->at;
    if (!PyTuple_Check(value)) return PyErr_Format(PyExc_TypeError, "%R given", value), 0;
    return PyArg_ParseTuple(value, "iK", INTO(patch->value)) && known(list, patch->value);
}

// The TMA descriptor of a matrix, as Triton makes it. A run puts the address in.
static CUresult describe(CUtensorMap *map, const Parameter *as, uint64_t rows, uint64_t columns) {
    const cuuint64_t sizes[] = {columns, rows}, pitch[] = {columns * as->itemsize};
    const cuuint32_t block[] = {as->block_columns, as->block_rows}, steps[] = {1, 1};
    return p_cuTensorMapEncodeTiled(
        map, as->type, 2, (void *)ALIGNED, sizes, pitch, block, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, as->swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// A matrix is an operand with its rows and columns.
static int put_matrix(List *list, Kernel *kernel, const Parameter *to, PyObject *value) {
    unsigned char *at = kernel->memory + to->at;
    Patch *patch = &kernel->patches[kernel->patch_count++];
    patch->how = to->how, patch->at = to->at;
    unsigned long long rows, columns;
    if (!PyTuple_Check(value)) return PyErr_Format(PyExc_TypeError, "%R given", value), 0;
    if (!PyArg_ParseTuple(value, "iKKK", INTO(patch->value), &rows, &columns)) return 0;
    struct { uint32_t sizes[2]; uint64_t strides[2]; } behind = {{rows, columns}, {columns, 1}};
    memcpy(at + sizeof(CUtensorMap), &behind, sizeof behind);
    static const size_t places[] = {0, 128, 132, 136, 144};
    for (int i = 0; i < 5; i++) kernel->parameters[kernel->count++] = at + places[i];
    CUresult code = describe((CUtensorMap *)at, to, rows, columns);
    if (code) PyErr_Format(PyExc_RuntimeError, "cuTensorMapEncodeTiled failed: %d", (int)code);
    return !code && known(list, patch->value);
}

// launch(stream, function, grid, threads, shared, size, parameters, values): a kernel with so many
// bytes of parameters, which lie as an array of `Parameter` says; a value for each
static PyObject *List_launch(PyObject *self, PyObject *arguments) {
    Value stream;
    unsigned long long function;
    CUlaunchConfig config = {.blockDimY = 1, .blockDimZ = 1};
    Py_ssize_t size, bytes;
    const char *given;
    PyObject *values;
    if (!PyArg_ParseTuple(arguments, VALUE "K(III)IIny#O!", INTO(stream), &function,
                          &config.gridDimX, &config.gridDimY, &config.gridDimZ, &config.blockDimX,
                          &config.sharedMemBytes, &size, &given, &bytes, &PyList_Type, &values))
        return NULL;
    Py_ssize_t count = PyList_GET_SIZE(values);
    if (count * (Py_ssize_t)sizeof(Parameter) != bytes)
        return PyErr_Format(PyExc_ValueError, "%zd values given for %zd bytes of parameters", count,
                            bytes);
    Kernel *kernel = PyMem_Calloc(1, sizeof *kernel);
    void *memory = NULL;
    if (!kernel || posix_memalign(&memory, ALIGNED, size + 1)) {
        PyMem_Free(kernel);
        return PyErr_NoMemory();
    }
    kernel->function = (CUfunction)(uintptr_t)function;
    kernel->config = config;
    kernel->memory = memset(memory, 0, size);
    Operation *one = more((List *)self);
    if (!one) return NULL;
    one->kind = LAUNCH, one->stream = stream, one->kernel = kernel;  // the list frees it
    if (!known((List *)self, stream)) return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        Parameter to;
        memcpy(&to, given + i * sizeof to, sizeof to);
        if (to.how < 0 || to.how > AS_MAP || to.at < 0 || kernel->count + 5 > PARAMETERS ||
            to.at + SIZES[to.how] > (size_t)size)
            return PyErr_Format(PyExc_IndexError, "parameter %zd at %d given, at most %d of %zd "
                                "bytes expected", i, to.at, PARAMETERS, size);
        PyObject *value = PyList_GET_ITEM(values, i);
        if (!(to.how == AS_MAP ? put_matrix : put_number)((List *)self, kernel, &to, value))
            return NULL;
    }
    Py_RETURN_NONE;
}

// make_eager(): no run in a capture
static PyObject *List_make_eager(PyObject *self, PyObject *nothing) {
    ((List *)self)->eager = 1;
    Py_RETURN_NONE;
}

static void List_free(PyObject *self) {
    List *list = (List *)self;
    for (int i = 0; i < list->count; i++)
        if (list->operations[i].kernel) {
            free(list->operations[i].kernel->memory);
            PyMem_Free(list->operations[i].kernel);
        }
    PyMem_Free(list->operations);
    Py_TYPE(self)->tp_free(self);
}

static Py_ssize_t List_length(PyObject *self) { return ((List *)self)->count; }
static PySequenceMethods as_sequence = {.sq_length = List_length};

static PyMethodDef methods[] = {
    {"add", List_add, METH_O, NULL},
    {"launch", List_launch, METH_VARARGS, NULL},
    {"make_eager", List_make_eager, METH_NOARGS, NULL},
    {"run", (PyCFunction)(void (*)(void))List_run, METH_FASTCALL, NULL},
    {NULL}};
static PyTypeObject ListType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "flux_megatron_enqueue.List",
    .tp_basicsize = sizeof(List),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = List_init,
    .tp_dealloc = List_free,
    .tp_as_sequence = &as_sequence,
    .tp_methods = methods,
};

// bind(path): the driver whose functions all lists call
static PyObject *bind(PyObject *self, PyObject *arguments) {
    const char *path, *missing = NULL;
    if (!PyArg_ParseTuple(arguments, "s", &path)) return NULL;
    void *library = dlopen(path, RTLD_NOW);
    if (!library) return PyErr_Format(PyExc_OSError, "%s", dlerror());
#define FIND(name) \
    if (!(p_##name = (__typeof__(&name))dlsym(library, NAME(name)))) missing = NAME(name);
    FUNCTIONS(FIND)
    if (missing) return PyErr_Format(PyExc_OSError, "%s has no %s", path, missing);
    Py_RETURN_NONE;
}

// parameters(function): the sizes of a kernel's parameters, as the driver knows them
static PyObject *parameters(PyObject *self, PyObject *arguments) {
    unsigned long long function;
    size_t offset, size;
    if (!PyArg_ParseTuple(arguments, "K", &function)) return NULL;
    PyObject *sizes = PyList_New(0);
    for (size_t i = 0; sizes && i < PARAMETERS; i++) {
        if (p_cuFuncGetParamInfo((CUfunction)(uintptr_t)function, i, &offset, &size)) break;
        PyObject *one = PyLong_FromSize_t(size);
        if (!one || PyList_Append(sizes, one)) Py_CLEAR(sizes);
        Py_XDECREF(one);
    }
    return sizes;
}

// descriptor(parameter, rows, columns): the bytes of one as lists have it, at the address ALIGNED
static PyObject *descriptor(PyObject *self, PyObject *arguments) {
    const char *given;
    Py_ssize_t size;
    unsigned long long rows, columns;
    Parameter as;
    CUtensorMap map;
    if (!PyArg_ParseTuple(arguments, "y#KK", &given, &size, &rows, &columns)) return NULL;
    if (size != sizeof as) return PyErr_Format(PyExc_ValueError, "%zd bytes given", size);
    CUresult code = describe(&map, memcpy(&as, given, sizeof as), rows, columns);
    if (code) return PyErr_Format(PyExc_RuntimeError, "cuTensorMapEncodeTiled failed: %d", code);
    return PyBytes_FromStringAndSize((const char *)&map, sizeof map);
}

static PyMethodDef functions[] = {
    {"bind", bind, METH_VARARGS, NULL}, {"parameters", parameters, METH_VARARGS, NULL},
    {"descriptor", descriptor, METH_VARARGS, NULL}, {NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "flux_megatron_enqueue", NULL, -1, functions};

PyMODINIT_FUNC PyInit_flux_megatron_enqueue(void) {
    PyObject *module = PyType_Ready(&ListType) ? NULL : PyModule_Create(&definition);
    if (module && PyModule_AddObjectRef(module, "List", (PyObject *)&ListType)) Py_CLEAR(module);
    return module;
}

/* The thin way from Python into the library: an operation's address and its arguments, integers and floats, which are
 * laid out as the operation's struct. Measured at 0.2 microseconds a call, where ctypes takes 3.
 *
 * Between record() and stop() the calls of this thread are also written down; replay() makes them again, in order and
 * with the same pointers, without Python in between. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MOST 32

typedef void (*Operation)(const int64_t*);

typedef struct {
  Operation operation;
  int64_t arguments[MOST];
} Call;

typedef struct {
  Call* calls;
  Py_ssize_t count, room;
} Program;

static _Thread_local Program* recording = NULL;

static const char PROGRAM[] = "fastgen.program";

static void free_program(Program* program) {
  if (program) free(program->calls);
  free(program);
}

static int append(Program* program, const Call* call) {
  if (program->count == program->room) {
    Py_ssize_t room = program->room ? 2 * program->room : 256;
    Call* calls = realloc(program->calls, (size_t)room * sizeof(Call));
    if (!calls) return -1;
    program->calls = calls;
    program->room = room;
  }
  program->calls[program->count++] = *call;
  return 0;
}

static PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  (void)self;
  if (count < 1 || count > MOST) {
    PyErr_SetString(PyExc_TypeError, "call(address, up to 31 integers and floats)");
    return NULL;
  }
  Call made;
  memset(&made, 0, sizeof made);
  made.operation = (Operation)(intptr_t)PyLong_AsLongLong(args[0]);
  if (PyErr_Occurred()) return NULL;
  for (Py_ssize_t i = 1; i < count; ++i) {
    if (PyFloat_Check(args[i])) {
      double value = PyFloat_AsDouble(args[i]);
      memcpy(&made.arguments[i - 1], &value, sizeof value);
    } else {
      made.arguments[i - 1] = PyLong_AsLongLong(args[i]);
      if (made.arguments[i - 1] == -1 && PyErr_Occurred()) return NULL;
    }
  }
  if (recording && append(recording, &made)) return PyErr_NoMemory();
  Py_BEGIN_ALLOW_THREADS
  made.operation(made.arguments);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

static PyObject* record(PyObject* self, PyObject* unused) {
  (void)self;
  (void)unused;
  if (recording) {
    PyErr_SetString(PyExc_RuntimeError, "this thread is recording already");
    return NULL;
  }
  recording = calloc(1, sizeof(Program));
  if (!recording) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

static void drop(PyObject* capsule) { free_program(PyCapsule_GetPointer(capsule, PROGRAM)); }

static PyObject* stop(PyObject* self, PyObject* unused) {
  (void)self;
  (void)unused;
  Program* program = recording;
  if (!program) {
    PyErr_SetString(PyExc_RuntimeError, "this thread is not recording");
    return NULL;
  }
  recording = NULL;
  if (!program->count) {
    free_program(program);
    Py_RETURN_NONE;
  }
  PyObject* capsule = PyCapsule_New(program, PROGRAM, drop);
  if (!capsule) free_program(program);
  return capsule;
}

static PyObject* replay(PyObject* self, PyObject* capsule) {
  (void)self;
  Program* program = PyCapsule_GetPointer(capsule, PROGRAM);
  if (!program) return NULL;
  Py_BEGIN_ALLOW_THREADS
  for (Py_ssize_t i = 0; i < program->count; ++i) program->calls[i].operation(program->calls[i].arguments);
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"call", (PyCFunction)(void (*)(void))call, METH_FASTCALL, "call(address, *arguments): one operation"},
    {"record", record, METH_NOARGS, "write down the calls of this thread from now on"},
    {"stop", stop, METH_NOARGS, "stop writing down -> what was written; None: nothing"},
    {"replay", replay, METH_O, "replay(what stop() gave)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "fastgen_cpu_binding", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_fastgen_cpu_binding(void) { return PyModule_Create(&module); }

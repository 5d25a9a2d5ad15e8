# Finds llama.cpp and checks it against the pin. Sets:
#   SKIPPY_LLAMA_INCLUDE   folder of llama.h
#   SKIPPY_LLAMA_LIBRARIES libllama, libggml, libggml-base, libggml-cpu: full paths
#   SKIPPY_LLAMA_RPATH     where the installed extension looks for them
#
# By default the installed PyPI package llama-cpp-python is used; its two copies of the libraries are equal, and the one
# in llama_cpp/lib is taken, so that a process that also imports llama_cpp holds one ggml. -DSKIPPY_LLAMA_CPP_DIR=PREFIX
# takes an install prefix of llama.cpp instead (include/llama.h, lib/libllama.so).
include(${CMAKE_CURRENT_LIST_DIR}/pin.cmake)

set(SKIPPY_LLAMA_CPP_DIR "" CACHE PATH "Install prefix of llama.cpp; empty: the installed llama-cpp-python package")

if(SKIPPY_LLAMA_CPP_DIR)
  get_filename_component(_prefix "${SKIPPY_LLAMA_CPP_DIR}" ABSOLUTE)
  set(SKIPPY_LLAMA_INCLUDE "${_prefix}/include")
  set(_libraries "${_prefix}/lib")
  set(SKIPPY_LLAMA_RPATH "${_libraries}")
  set(_from "the prefix ${_prefix}")
else()
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
            "import importlib.metadata as m, importlib.util as u, os; \
s = u.find_spec('llama_cpp'); \
print(m.version('llama-cpp-python') + ';' + os.path.dirname(s.origin)) if s and s.origin else print('none;')"
    OUTPUT_VARIABLE _found
    ERROR_VARIABLE _ignored
    OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT _found OR _found MATCHES "^none")
    message(FATAL_ERROR "llama.cpp was not found: wanted the Python package llama-cpp-python==${SKIPPY_PIN_PACKAGE} in "
                        "${Python_EXECUTABLE} (pip install llama-cpp-python==${SKIPPY_PIN_PACKAGE}), or "
                        "-DSKIPPY_LLAMA_CPP_DIR=<install prefix of llama.cpp>")
  endif()
  list(GET _found 0 _version)
  list(GET _found 1 _package)
  if(NOT _version STREQUAL SKIPPY_PIN_PACKAGE)
    message(FATAL_ERROR "llama-cpp-python ${_version} was found in ${_package}, wanted ${SKIPPY_PIN_PACKAGE}: "
                        "pip install llama-cpp-python==${SKIPPY_PIN_PACKAGE}")
  endif()
  get_filename_component(_site "${_package}" DIRECTORY)
  set(SKIPPY_LLAMA_INCLUDE "${_site}/include")
  set(_libraries "${_package}/lib")
  set(SKIPPY_LLAMA_RPATH "$ORIGIN/../llama_cpp/lib")
  set(_from "the package in ${_package}")
endif()

if(NOT EXISTS "${SKIPPY_LLAMA_INCLUDE}/llama.h")
  message(FATAL_ERROR "llama.h was not found in ${SKIPPY_LLAMA_INCLUDE} (${_from})")
endif()
set(SKIPPY_LLAMA_LIBRARIES "")
foreach(_name llama ggml ggml-base ggml-cpu)
  set(_library "${_libraries}/${CMAKE_SHARED_LIBRARY_PREFIX}${_name}${CMAKE_SHARED_LIBRARY_SUFFIX}")
  if(NOT EXISTS "${_library}")
    message(FATAL_ERROR "${_library} was not found (${_from})")
  endif()
  list(APPEND SKIPPY_LLAMA_LIBRARIES "${_library}")
endforeach()

# The library itself says what it is: ask it before anything is compiled.
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c
          "import ctypes, sys; \
f = ctypes.CDLL(sys.argv[1]).llama_version; f.restype = ctypes.c_char_p; print(f().decode())"
          "${_libraries}/${CMAKE_SHARED_LIBRARY_PREFIX}llama${CMAKE_SHARED_LIBRARY_SUFFIX}"
  OUTPUT_VARIABLE _llama
  ERROR_VARIABLE _why
  OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT _llama STREQUAL SKIPPY_PIN_LLAMA)
  message(FATAL_ERROR "llama.cpp '${_llama}' was found in ${_libraries}, wanted '${SKIPPY_PIN_LLAMA}' (the llama.cpp of "
                      "llama-cpp-python ${SKIPPY_PIN_PACKAGE}). ${_why}")
endif()
message(STATUS "llama.cpp ${_llama} from ${_from}")

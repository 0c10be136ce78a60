;;; An echo server in Common Lisp (SBCL): sbcl --script echo.lisp PORT
;;;
;;; Compiled code and data share memory that is writable and executable. The collector stops the
;;; threads by signals while they wait for their connections.

(require :sb-bsd-sockets)

(defun echo (socket)
  (let ((buffer (make-array 65536 :element-type '(unsigned-byte 8))))
    (loop
      (multiple-value-bind (data count) (sb-bsd-sockets:socket-receive socket buffer nil)
        (declare (ignore data))
        (when (or (null count) (zerop count))
          (sb-bsd-sockets:socket-close socket)
          (return))
        ;; Garbage, so that the collector runs every few messages.
        (make-array 200000)
        (loop with sent = 0
              while (< sent count)
              do (incf sent (sb-bsd-sockets:socket-send socket (subseq buffer sent count) nil)))))))

(let ((listener (make-instance 'sb-bsd-sockets:inet-socket :type :stream :protocol :tcp))
      (port (parse-integer (car (last sb-ext:*posix-argv*)))))
  (setf (sb-bsd-sockets:sockopt-reuse-address listener) t)
  (sb-bsd-sockets:socket-bind listener #(127 0 0 1) port)
  (sb-bsd-sockets:socket-listen listener 64)
  (loop
    (let ((socket (sb-bsd-sockets:socket-accept listener)))
      (sb-thread:make-thread #'echo :arguments (list socket)))))
